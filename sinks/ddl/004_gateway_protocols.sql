-- What the second version of call records adds: the intent holds the prompt, the outcome more of what it came from.

ALTER TABLE call_starts
    ADD COLUMN IF NOT EXISTS protocol LowCardinality(String),
    ADD COLUMN IF NOT EXISTS prompt_suffix Array(UInt32) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS prompt_base_call_id Nullable(String) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS prompt_base_len Int64,
    ADD COLUMN IF NOT EXISTS sampling String CODEC(ZSTD(1));

ALTER TABLE model_calls
    ADD COLUMN IF NOT EXISTS sampling_requested String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS stop_reason String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS engine_fingerprint LowCardinality(String),
    ADD COLUMN IF NOT EXISTS tools_digest LowCardinality(String),
    ADD COLUMN IF NOT EXISTS adapter LowCardinality(String),
    ADD COLUMN IF NOT EXISTS adapter_digest LowCardinality(String),
    ADD COLUMN IF NOT EXISTS version_before Nullable(Int64),
    ADD COLUMN IF NOT EXISTS version_after Nullable(Int64),
    ADD COLUMN IF NOT EXISTS pause_mode LowCardinality(String),
    ADD COLUMN IF NOT EXISTS cache_cleared Nullable(Bool);

ALTER TABLE policy_versions
    ADD COLUMN IF NOT EXISTS adapter LowCardinality(String),
    ADD COLUMN IF NOT EXISTS base_version Nullable(Int64),
    ADD COLUMN IF NOT EXISTS pause_mode LowCardinality(String);
