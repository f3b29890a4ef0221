"""Keys of earlier versions that are no more, with what took their place: the answer to an old file."""

from __future__ import annotations

from collections.abc import Mapping

_CONSTANT = "it is a constant now; leave it out"

#: By ``Struct.key``. A key stays here for the versions in which files may still have it.
RENAMED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "HttpConfig.prompts_max",
            "HttpConfig.choices_max",
            "HttpConfig.reader_buffer_bytes",
            "HttpConfig.reader_behind_s",
            "HttpConfig.connections_max",
            "HttpConfig.read_s",
            "HttpConfig.idle_s",
            "DispatchConfig.submit_timeout_s",
            "DispatchConfig.tries_max",
            "TaggingConfig.pause_s",
            "ContinuationConfig.step_s",
            "ContinuationConfig.step_factor",
            "ContinuationConfig.reconnect_grace_s",
            "ContinuationConfig.resend_timeout_s",
            "ContinuationConfig.probe_s",
            "ModelledConfig.wire",
            "ServiceCounts.taggers",
            "Constraints.move_hysteresis",
        ),
        _CONSTANT,
    ),
    "DispatchConfig.policy_per_request": "removed: requests name no policy any more",
    **{
        f"KvReplicaSpec.{key}": f"set `settings.migrator.replicas.{key}`"
        for key in ("per_instance_max", "bytes_per_s", "interval_ms")
    },
    "WorkerConfig.remaining": "removed: docs/MOVING.md says when an engine reads hidden states",
    "FenceConfig.hysteresis": "removed: a sequence leaves at its stage's boundary",
    "BusConfig.tls_ca": "set `nats.tls` of the cluster's file",
    "BusConfig.password_file": "removed: nothing wrote one; set `password`",
    "LimitsConfig.sequences_open_max": "it is twice `calls_open_max` now",
    "ModelledConfig.parameters": "the worker's own keys hold for modelled engines too: `max_num_seqs`, `kv_blocks`, "
    "`block_size`, `max_num_batched_tokens`, `max_model_len`, `enable_prefix_caching`",
    "MigrationSpec.copy": "removed: copies take no time of modelled engines; leave it out",
    "MembershipConfig.plan_silence_ms": "it is twice `instance_silence_ms` now",
    "PredictorConfig.neighbours": "removed: engines of one host are not told apart any more",
}
