-- What gateway and environment wrote. Codecs: measured on token data, see the docs on storage.
-- Forward only: a released file is never edited; the next change is the next number.

CREATE TABLE IF NOT EXISTS rollout_openings
(
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    group_size Int64,
    task_id LowCardinality(String),
    opened_at_ms Int64 CODEC(Delta, ZSTD(1)),
    task String CODEC(ZSTD(3)),
    policy LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'A rollout attempt was opened.';

CREATE TABLE IF NOT EXISTS call_starts
(
    call_id String CODEC(ZSTD(1)),
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    call_index Int64,
    prompt_length_tokens Int64,
    prompt_digest String CODEC(ZSTD(1)),
    request_digest String CODEC(ZSTD(1)),
    started_at_ms Int64 CODEC(Delta, ZSTD(1)),
    call_attempt Int64,
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, call_index, call_id, call_attempt, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'The intent of each model call, written before the engine was asked.';

CREATE TABLE IF NOT EXISTS model_calls
(
    call_id String CODEC(ZSTD(1)),
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    call_index Int64,
    protocol LowCardinality(String),
    adapter_version LowCardinality(String),
    model_requested LowCardinality(String),
    model_served LowCardinality(String),
    engine LowCardinality(String),
    engine_version LowCardinality(String),
    encoding_tokenizer_digest LowCardinality(String),
    encoding_chat_template_digest LowCardinality(String),
    encoding_template_kwargs_digest LowCardinality(String),
    encoding_parser LowCardinality(String),
    sampling_temperature Float64,
    sampling_top_p Float64,
    sampling_top_k Int64,
    sampling_max_tokens Int64,
    sampling_seed Nullable(Int64),
    sampling_stop Array(String) CODEC(ZSTD(1)),
    logprob_semantics LowCardinality(String),
    prompt_suffix Array(UInt32) CODEC(ZSTD(1)),
    prompt_length Int64,
    prompt_digest String CODEC(ZSTD(1)),
    prompt_base_call_id Nullable(String) CODEC(ZSTD(1)),
    prompt_base_len Int64,
    output_ids Array(UInt32) CODEC(T64, ZSTD(1)),
    output_logprobs Array(Float32) CODEC(ZSTD(1)),
    version_spans Array(Tuple(start Int64, end Int64, version Int64)) CODEC(ZSTD(1)),
    policy LowCardinality(String),
    finish_reason LowCardinality(String),
    outcome LowCardinality(String),
    delivered LowCardinality(String),
    trainable Bool,
    defects Array(String) CODEC(ZSTD(1)),
    request_digest String CODEC(ZSTD(1)),
    started_at_ms Int64 CODEC(Delta, ZSTD(1)),
    finished_at_ms Int64 CODEC(Delta, ZSTD(1)),
    first_token_at_ms Nullable(Int64) CODEC(ZSTD(1)),
    call_attempt Int64,
    choice_index Int64,
    message String CODEC(ZSTD(3)),
    error Nullable(String) CODEC(ZSTD(1)),
    harness LowCardinality(String),
    state_key Nullable(String) CODEC(ZSTD(1)),
    action_key Nullable(String) CODEC(ZSTD(1)),
    request_ref Nullable(String) CODEC(ZSTD(1)),
    response_ref Nullable(String) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, call_index, call_id, call_attempt, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'The outcome of each model call: exact prompt (as a delta), sampled ids, log-probabilities, versions.';

CREATE TABLE IF NOT EXISTS call_deliveries
(
    call_id String CODEC(ZSTD(1)),
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    delivered LowCardinality(String),
    reason LowCardinality(String),
    at_ms Int64 CODEC(Delta, ZSTD(1)),
    call_attempt Int64,
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, call_id, call_attempt, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Corrections: answers that did not reach the client whole.';

CREATE TABLE IF NOT EXISTS environment_events
(
    event_id String CODEC(ZSTD(1)),
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    kind LowCardinality(String),
    content String CODEC(ZSTD(3)),
    at_ms Int64 CODEC(Delta, ZSTD(1)),
    call_id Nullable(String) CODEC(ZSTD(1)),
    reward Nullable(Float64),
    is_executable Nullable(Bool),
    state_key Nullable(String) CODEC(ZSTD(1)),
    content_ref Nullable(String) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, event_id, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'What happened in the environment.';

CREATE TABLE IF NOT EXISTS terminals
(
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    group_size Int64,
    task_id LowCardinality(String),
    status LowCardinality(String),
    finished_at_ms Int64 CODEC(Delta, ZSTD(1)),
    outcome String CODEC(ZSTD(3)),
    expected_calls Nullable(Int64),
    expected_events Nullable(Int64),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, rollout_id, attempt, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'The end of each rollout attempt.';
