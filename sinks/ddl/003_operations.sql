-- Policies, trainers, dead letters, and how far the sink got.

CREATE TABLE IF NOT EXISTS policy_versions
(
    policy LowCardinality(String),
    version Int64,
    weights_ref String CODEC(ZSTD(1)),
    published_at_ms Int64 CODEC(Delta, ZSTD(1)),
    weights_digest String CODEC(ZSTD(1)),
    parent_version Nullable(Int64),
    step Nullable(Int64),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (policy, version, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Versions of the weights.';

CREATE TABLE IF NOT EXISTS consumptions
(
    consumption_id String CODEC(ZSTD(1)),
    trainer LowCardinality(String),
    step Int64,
    policy LowCardinality(String),
    version_before Int64,
    version_after Int64,
    sample_ids Array(String) CODEC(ZSTD(1)),
    group_ids Array(String) CODEC(ZSTD(1)),
    skipped Array(Tuple(group_id String, reason String)) CODEC(ZSTD(1)),
    at_ms Int64 CODEC(Delta, ZSTD(1)),
    checkpoint Nullable(String) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (trainer, step, consumption_id)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Which samples went into which optimizer step; a step that was repeated after a crash is one row.';

CREATE TABLE IF NOT EXISTS dead_letters
(
    dead_letter_id String CODEC(ZSTD(1)),
    boundary LowCardinality(String),
    reason LowCardinality(String),
    message String CODEC(ZSTD(1)),
    topic LowCardinality(String),
    partition Int64,
    offset Int64,
    value String CODEC(ZSTD(3)),
    at_ms Int64 CODEC(Delta, ZSTD(1)),
    key Nullable(String) CODEC(ZSTD(3)),
    rollout_id Nullable(String) CODEC(ZSTD(1)),
    call_id Nullable(String) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (topic, partition, offset, boundary, dead_letter_id)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'What could not be used, with its bytes.';

CREATE TABLE IF NOT EXISTS ingest_ledger
(
    topic LowCardinality(String),
    partition Int32,
    topic_id String,
    first_offset Int64,
    last_offset Int64,
    records UInt32,
    digest String,
    stored_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree
ORDER BY (topic, topic_id, partition, first_offset, last_offset, digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'One row a chunk, written after the chunk''s rows: the next chunk starts after the highest last_offset.';
