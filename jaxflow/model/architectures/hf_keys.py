"""Access to the keys of a config. A key that is neither read nor known to be harmless is refused by name."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxflow.config import ConfigError

# Keys of training, generation, other software or the file itself. They do not change the computation.
_IRRELEVANT_NAMES = """
    _attn_implementation _attn_implementation_autoset aux_loss_alpha seq_aux _commit_hash
    _flash_attn_2_enabled _name_or_path activation_dropout attention_dropout attention_probs_dropout_prob
    attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens cache_implementation
    chunk_size_feed_forward classifier_dropout decoder_start_token_id diversity_penalty do_sample dropout
    dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
    hidden_dropout_prob id2label init_std initializer_range is_decoder label2id layerdrop length_penalty
    loss_type max_length max_sequence_length min_length model_max_length neftune_noise_alpha
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_flash_attention
"""
_IRRELEVANT = frozenset(_IRRELEVANT_NAMES.split())

# Keys that change the computation unless they have one of these values.
_ONLY: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "ep_size": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),  # families whose config class lacks this key
    "is_encoder_decoder": (False,),
    "is_llama_config": (True,),
    "layer_norm_elementwise_affine": (True,),
    "_remove_final_layer_norm": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "qk_layer_norms": (False,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}


class Keys:
    """The keys of one JSON object. Each is taken once. `finish` refuses the keys that are left.

    Each method raises ConfigError for a value of another type.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = ""):
        self._left, self._prefix = dict(values), prefix

    def name(self, key: str) -> str:
        """Return the full name of a key, for error messages."""
        return self._prefix + key

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value, or the default if the key is absent. A null is None."""
        return self._left.pop(key, default)

    def has(self, key: str) -> bool:
        """Return True if the key has a value that is not null."""
        return self._left.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self._left.pop(key, None)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ConfigError(self.name(key), value, f"a whole number from {least} to {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._left.pop(key, None)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (math.isfinite(value) and value > 0)
        ):
            raise ConfigError(self.name(key), value, "a positive number")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """Return a positive number. An absent key gives the default, a null gives None."""
        if key in self._left and self._left[key] is None:
            return self._left.pop(key)
        return self.number(key, default) if key in self._left or default is not None else None

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._left.pop(key, None)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(self.name(key), value, "true or false")
        return value

    def one_of(self, key: str, *accepted: Any, accepts: str = "") -> Any:
        """Return a value that must be one of `accepted`. accepts: describes them in the error."""
        value = self.take(key)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            raise ConfigError(self.name(key), value, accepts or " or ".join(repr(one) for one in accepted))
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Return an object, or None."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(self.name(key), value, "an object, or null")
        return value

    def finish(
        self, irrelevant: Collection[str] = _IRRELEVANT, only: Mapping[str, tuple[object, ...]] = _ONLY
    ) -> None:
        """Raise ConfigError for an unread key that may change the computation."""
        for key, value in self._left.items():
            if value is None or key in irrelevant:
                continue
            if key in only:
                # In Python 0 == False, but these keys are booleans.
                if not any(
                    value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                    for allowed in only[key]
                ):
                    raise ConfigError(
                        self.name(key), value, " or ".join(repr(allowed) for allowed in only[key])
                    )
            elif key in ("quantization_config", "compression_config"):
                raise ConfigError(
                    self.name(key),
                    value,
                    "no quantization here; `open_checkpoint` reads this key",
                )
            elif key == "auto_map":
                raise ConfigError(
                    self.name(key), value, "no auto_map: JaxFlow runs no model code of a checkpoint"
                )
            else:
                raise ConfigError(
                    self.name(key),
                    value,
                    "no such key: JaxFlow does not know this key, which may change the computation",
                )
