-- What the stages made of it.

CREATE TABLE IF NOT EXISTS rollouts
(
    rollout_id String CODEC(ZSTD(1)),
    attempt Int64,
    group_id String CODEC(ZSTD(1)),
    group_size Int64,
    task_id LowCardinality(String),
    task String CODEC(ZSTD(3)),
    policy LowCardinality(String),
    status LowCardinality(String),
    outcome String CODEC(ZSTD(3)),
    closed_by LowCardinality(String),
    calls Array(Tuple(call_id String, call_attempt Int64, delivered String)) CODEC(ZSTD(1)),
    sampled_tokens Int64,
    trainable_tokens Int64,
    lost_call_ids Array(String) CODEC(ZSTD(1)),
    event_ids Array(String) CODEC(ZSTD(1)),
    opened_at_ms Int64 CODEC(Delta, ZSTD(1)),
    closed_at_ms Int64 CODEC(Delta, ZSTD(1)),
    digest String CODEC(ZSTD(1)),
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    version_min Nullable(Int64),
    version_max Nullable(Int64),
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
COMMENT 'Complete rollouts; calls and events by reference.';

CREATE TABLE IF NOT EXISTS groups
(
    group_id String CODEC(ZSTD(1)),
    revision Int64,
    group_size Int64,
    task_id LowCardinality(String),
    closed_by LowCardinality(String),
    members Array(Tuple(rollout_id String, attempt Int64, rollout_digest String, status String, num_calls Int64, trainable_tokens Int64, closed_at_ms Int64, version_min Nullable(Int64), version_max Nullable(Int64))) CODEC(ZSTD(1)),
    missing Array(Tuple(reason String, rollout_id Nullable(String))) CODEC(ZSTD(1)),
    closed_at_ms Int64 CODEC(Delta, ZSTD(1)),
    digest String CODEC(ZSTD(1)),
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, revision, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Closed groups.';

CREATE TABLE IF NOT EXISTS scores
(
    group_id String CODEC(ZSTD(1)),
    group_revision Int64,
    task_id LowCardinality(String),
    group_digest String CODEC(ZSTD(1)),
    scores_digest String CODEC(ZSTD(1)),
    position Int64,
    score_id String CODEC(ZSTD(1)),
    rollout_id String CODEC(ZSTD(1)),
    scorer LowCardinality(String),
    kind LowCardinality(String),
    version Int64,
    config_digest LowCardinality(String),
    value Nullable(Float64),
    verdict Nullable(String) CODEC(ZSTD(3)),
    error Nullable(String) CODEC(ZSTD(1)),
    latency_ms Int64 CODEC(Delta, ZSTD(1)),
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, group_revision, scores_digest, position)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Raw scores, one row a score.';

CREATE TABLE IF NOT EXISTS rewards
(
    group_id String CODEC(ZSTD(1)),
    group_revision Int64,
    task_id LowCardinality(String),
    group_digest String CODEC(ZSTD(1)),
    scores_digest String CODEC(ZSTD(1)),
    rewards_digest String CODEC(ZSTD(1)),
    position Int64,
    rollout_id String CODEC(ZSTD(1)),
    components Array(Tuple(score_id String, scorer String, raw Float64, weight Float64, value Float64)) CODEC(ZSTD(1)),
    value Nullable(Float64),
    excluded Nullable(String) CODEC(ZSTD(1)),
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, group_revision, rewards_digest, position)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Rewards with their components, one row a rollout.';

CREATE TABLE IF NOT EXISTS credits
(
    group_id String CODEC(ZSTD(1)),
    group_revision Int64,
    task_id LowCardinality(String),
    group_digest String CODEC(ZSTD(1)),
    scores_digest String CODEC(ZSTD(1)),
    rewards_digest String CODEC(ZSTD(1)),
    credits_digest String CODEC(ZSTD(1)),
    position Int64,
    scope LowCardinality(String),
    rollout_id String CODEC(ZSTD(1)),
    status LowCardinality(String),
    value Float64,
    call_id Nullable(String) CODEC(ZSTD(1)),
    start Nullable(Int64),
    end Nullable(Int64),
    statistics_count Int64,
    statistics_mean Float64,
    statistics_std Float64,
    statistics_m2 Float64,
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    earlier_stages Array(Tuple(name String, kind String, version Int64, config_digest String)) CODEC(ZSTD(1)),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, group_revision, credits_digest, position)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Advantages, one row a credit.';

CREATE TABLE IF NOT EXISTS samples
(
    sample_id String CODEC(ZSTD(1)),
    group_id String CODEC(ZSTD(1)),
    group_revision Int64,
    rollout_id String CODEC(ZSTD(1)),
    rollout_attempt Int64,
    task_id LowCardinality(String),
    policy LowCardinality(String),
    ids Array(UInt32) CODEC(ZSTD(1)),
    mask Array(UInt8) CODEC(ZSTD(1)),
    logprobs Array(Float32) CODEC(ZSTD(1)),
    advantages Array(Float32) CODEC(ZSTD(1)),
    versions Array(Tuple(start Int64, end Int64, version Int64)) CODEC(ZSTD(1)),
    segments Array(Tuple(call_id String, start Int64, end Int64, prompt_digest String)) CODEC(ZSTD(1)),
    loss_weight Float64,
    aggregation LowCardinality(String),
    divisor LowCardinality(String),
    sampled_tokens Int64,
    rollout_tokens Int64,
    group_tokens Int64,
    group_rollouts Int64,
    sample_index Int64,
    rollout_samples Int64,
    reward Float64,
    temperature Float64,
    logprob_semantics LowCardinality(String),
    encoding_digest LowCardinality(String),
    status LowCardinality(String),
    version_min Int64,
    version_max Int64,
    rollout_digest String CODEC(ZSTD(1)),
    scores_digest String CODEC(ZSTD(1)),
    rewards_digest String CODEC(ZSTD(1)),
    credits_digest String CODEC(ZSTD(1)),
    stages Array(Tuple(name String, kind String, version Int64, config_digest String)) CODEC(ZSTD(1)),
    created_at_ms Int64 CODEC(Delta, ZSTD(1)),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, group_revision, rollout_id, sample_index, sample_id, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Training samples.';

CREATE TABLE IF NOT EXISTS built_groups
(
    group_id String CODEC(ZSTD(1)),
    group_revision Int64,
    task_id LowCardinality(String),
    sample_ids Array(String) CODEC(ZSTD(1)),
    masked Array(Tuple(call_id String, rollout_id String, reason String)) CODEC(ZSTD(1)),
    rollout_ids Array(String) CODEC(ZSTD(1)),
    credits_digest String CODEC(ZSTD(1)),
    mean_reward Nullable(Float64),
    has_spread Bool,
    created_at_ms Int64 CODEC(Delta, ZSTD(1)),
    stage_name LowCardinality(String),
    stage_kind LowCardinality(String),
    stage_version Int64,
    stage_config_digest LowCardinality(String),
    pipeline LowCardinality(String),
    pipeline_digest LowCardinality(String),
    _topic LowCardinality(String),
    _partition Int32,
    _offset Int64 CODEC(Delta, ZSTD(1)),
    _time DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    _digest String CODEC(ZSTD(1)),
    _stored_at DateTime64(3, 'UTC') DEFAULT now64(3) CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(_time)
ORDER BY (group_id, group_revision, _digest)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Groups whose samples are all written, and the calls that are in none, with the reason.';
