"""Make tiny checkpoints of few layers with random weights, and their goldens with `transformers`.

    uv run --group goldens python tests/make_mixture_goldens.py tiny-glm4_moe

writes tests/data/models/<name>/ and tests/data/goldens/<name>.json. The tests read only these files. Prompts
are drawn until every greedy token wins by `MARGIN`.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers

DATA = Path(__file__).parent / "data"
MARGIN = 0.04  # least gap of the two best logits: tests allow 1e-3
PROMPTS, NEW_TOKENS, BEST = (1, 7, 33, 150), 32, 5
TIED = 16  # tied embeddings are so much smaller, so that a token does not predict itself
PROBES = [0, 5, 170, 511]  # vocabulary ids

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MIXTURE = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # the seed of weights and prompts, and the config
    "tiny-glm4_moe": (
        20400001,
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **COMMON,
            **MIXTURE,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
}
MODELS["tiny-deepseek_v3"] = (
    20400002,
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **COMMON,
        **MIXTURE,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-3,  # the norms of both vectors keep 1e-6
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.5,
            "mscale_all_dim": 0.75,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": True,
        "q_lora_rank": 48,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)
MODELS["tiny-gemma4_text"] = (
    20400003,
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **{key: value for key, value in COMMON.items() if key != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "final_logit_softcapping": 30.0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision",
    },
)
MODELS["tiny-gemma4_dense"] = (
    20400004,
    {
        **MODELS["tiny-gemma4_text"][1],
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
)
MODELS["tiny-gemma4_e2b"] = (
    20400005,
    {
        **MODELS["tiny-gemma4_dense"][1],
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
)
FORMAT = {
    "prompt_ids": "input token ids; nothing is added to them (no BOS)",
    "prompt_logprobs": "log-softmax of prompt_ids[i+1] given prompt_ids[:i+1], i = 0..len-2",
    "prompt_logsumexp": "logsumexp of the logits at every prompt position (catches softcap / scale errors "
    "that a softmax hides)",
    "probe_ids/prompt_probe_logits": "raw logits of a few fixed vocabulary ids at every prompt position",
    "greedy_ids": "argmax continuation, end-of-sequence tokens NOT stopping it",
    "top_ids/top_logits": "the 5 largest raw logits at each generated step, largest first (step 0 is "
    "predicted from the prompt's last position)",
    "min_margin": "smallest top1-top2 logit gap over the generated steps",
}


def main() -> None:
    """Write the checkpoint and the golden of each named model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=MODELS)
    for name in parser.parse_args().models:
        golden = make_golden(name, *MODELS[name])
        path = DATA / "goldens" / f"{name}.json"
        path.write_text(json.dumps(golden))
        print(f"{path}: margins {[prompt['min_margin'] for prompt in golden['prompts']]}")


@torch.no_grad()
def make_golden(name: str, seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint. Return its golden."""
    folder = DATA / "models" / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    model = random_model(folder, seed)
    rng = torch.Generator().manual_seed(seed)
    prompts: list[dict[str, Any]] = []
    while len(prompts) < len(PROMPTS):
        ids = torch.randint(0, config["vocab_size"], (PROMPTS[len(prompts)],), generator=rng).tolist()
        found = of_prompt(model, ids)
        prompts += [found] if found["min_margin"] >= MARGIN else []
    exact = copy.deepcopy(model).double()
    texts = [torch.tensor([p["prompt_ids"] + p["greedy_ids"]]) for p in prompts]
    error = max((model(text).logits - exact(text).logits).abs().max().item() for text in texts)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # in the style of published files
    return {
        "model": f"models/{name}",
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, CPU, "
        "eager attention; logits from one uncached pass over prompt + continuation, whose argmax equals "
        "cached generate() at every step",
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_seed": seed,
        "max_abs_logit": round(max(model(text).logits.abs().max().item() for text in texts), 3),
        "float32_vs_float64_max_abs_logit_error": round(error, 6),
        "format": FORMAT,
        "prompts": prompts,
    }


def random_model(folder: Path, seed: int) -> Any:
    """Return the model of a folder's config. Its weights are normal, and no bias or norm is trivial."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.float().eval()
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        if "inv_freq" in name or name.endswith("embed_scale"):
            continue
        drawn = torch.randn(tensor.shape, generator=rng)
        if name == "model.norm.weight" and config.tie_word_embeddings:
            tensor.copy_(TIED * (1 + 0.2 * drawn))
        elif "norm" in name or name.endswith("scale"):
            tensor.copy_(1 + 0.2 * drawn)
        elif name.endswith("layer_scalar"):
            tensor.copy_(0.7 + 0.1 * drawn)
        elif "e_score_correction_bias" in name:
            tensor.copy_(0.2 * drawn)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * drawn)
        elif "embed_tokens_per_layer" in name:
            tensor.copy_(drawn / config.hidden_size_per_layer_input**0.5)
        elif "embed_tokens" in name:
            tensor.copy_(drawn / TIED if config.tie_word_embeddings else drawn)
        elif name.endswith("lm_head.weight"):
            tensor.copy_(drawn * 4 / tensor.shape[-1] ** 0.5)
        else:
            tensor.copy_(drawn * 1.5 / tensor.shape[-1] ** 0.5)
    return model


def of_prompt(model: Any, ids: list[int]) -> dict[str, Any]:
    """Return a prompt's entry of the golden."""
    given = torch.tensor([ids])
    cached = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
    )
    text = cached[0].tolist()
    logits = model(cached).logits[0]
    best = logits[len(ids) - 1 : -1].topk(BEST)
    margin = (best.values[:, 0] - best.values[:, 1]).min().item()
    same = best.indices[:, 0].tolist() == text[len(ids) :]
    assert same or margin < MARGIN, "one pass and cached generation differ"
    logprobs = logits.log_softmax(-1)
    return {
        "name": f"len{len(ids)}",
        "prompt_len": len(ids),
        "prompt_ids": ids,
        "prompt_logprobs": rounded([logprobs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]),
        "prompt_logsumexp": rounded(logits[: len(ids)].logsumexp(-1).tolist()),
        "probe_ids": PROBES,
        "prompt_probe_logits": [rounded(row) for row in logits[: len(ids), PROBES].tolist()],
        "greedy_ids": text[len(ids) :],
        "top_ids": best.indices.tolist(),
        "top_logits": [rounded(row) for row in best.values.tolist()],
        "min_margin": round(margin, 5),
    }


def rounded(values: list[float]) -> list[float]:
    """Return numbers with five decimals."""
    return [round(value, 5) for value in values]


if __name__ == "__main__":
    main()
