"""The small engine that the bench's commands are tested over."""

import paths

MODEL = str(paths.MODELS / "stories260K")
ENGINE = {
    "max_num_batched_tokens": 32,
    "step_sizes": "32",  # all steps are one program
    "max_num_seqs": 4,
    "max_model_len": 128,
    "num_kv_pages": 16,
    "enable_prefix_caching": False,
}
