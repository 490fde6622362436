"""Make the tiny gpt-oss checkpoint with seeded random weights, and its golden with `transformers`.

    uv run --group goldens python tests/make_gpt_oss_goldens.py

The experts are in MXFP4, as published. `transformers` turns them into 16 bits, which is exact.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_mixture_goldens import DATA, FORMAT, MARGIN, PROMPTS, of_prompt
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NAME, SEED = "tiny-gpt_oss", 28
Tensors = dict[str, np.ndarray]


def gpt_oss(rng: np.random.Generator) -> tuple[dict[str, Any], Tensors]:
    """Return the config and the tensors of a gpt-oss with MXFP4 experts.

    Gates and ups are large enough for the clamp. Sinks are as large as scores. The
    window is shorter than a page.
    """
    d, heads, kv_heads, width, vocabulary, experts, f, layers = 64, 4, 2, 32, 512, 8, 64, 2
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": vocabulary,
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": 512,
        "initial_context_length": 64,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
            "truncate": False,
        },
        "attention_bias": True,
        "attention_dropout": 0.0,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": experts,
        "num_experts_per_tok": 3,
        "experts_per_token": 3,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }

    def normal(*shape: int, size: float, mean: float = 0.0) -> np.ndarray:
        return (rng.standard_normal(shape) * size + mean).astype(np.float32)

    def packed(name: str, rows: int, columns: int, exponent: int) -> Tensors:
        """Return e2m1 numbers and scales around 2^exponent."""
        blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
        near = 127 + exponent
        return {
            f"{name}_blocks": rng.integers(0, 256, blocks, np.uint8),
            f"{name}_scales": rng.integers(near - 1, near + 2, scales, np.uint8),
            f"{name}_bias": normal(experts, rows, size=0.3),
        }

    tensors = {
        "model.embed_tokens.weight": normal(vocabulary, d, size=1.0),
        "model.norm.weight": normal(d, size=0.2, mean=1.0),
        "lm_head.weight": normal(vocabulary, d, size=0.5),
    }
    for layer in range(layers):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = normal(d, size=0.2, mean=1.0)
        outputs = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        for name, rows in outputs.items():
            tensors[f"{at}.{name}_proj.weight"] = normal(rows, d, size=d**-0.5)
            tensors[f"{at}.{name}_proj.bias"] = normal(rows, size=0.3)
        tensors[f"{at}.o_proj.weight"] = normal(d, heads * width, size=2 * (heads * width) ** -0.5)
        tensors[f"{at}.o_proj.bias"] = normal(d, size=0.3)
        tensors[f"{at}.sinks"] = normal(heads, size=1.0, mean=1.5)
        tensors[f"{mlp}.router.weight"] = normal(experts, d, size=d**-0.5)
        tensors[f"{mlp}.router.bias"] = normal(experts, size=0.5)
        tensors |= packed(f"{mlp}.experts.gate_up_proj", 2 * f, d, -2)
        tensors |= packed(f"{mlp}.experts.down_proj", d, f, -8)
    return config, tensors


def reference(config: dict[str, Any], tensors: Tensors) -> Any:
    """Return the model of `transformers`, in float32."""
    wide = {}
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            packed = torch.from_numpy(value), torch.from_numpy(tensors[f"{stem}_scales"])
            wide[stem] = convert_moe_packed_tensors(*packed, dtype=torch.float32).contiguous().numpy()
        elif not name.endswith("_scales"):
            wide[name] = value
    with tempfile.TemporaryDirectory() as folder:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (Path(folder) / "config.json").write_text(json.dumps(plain))
        save_file(wide, Path(folder) / "model.safetensors", {"format": "pt"})
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()


@torch.no_grad()
def main() -> None:
    """Write the checkpoint and the golden."""
    rng = np.random.default_rng(SEED)
    config, tensors = gpt_oss(rng)
    folder = DATA / "models" / NAME
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = reference(config, tensors)
    prompts: list[dict[str, Any]] = []
    while len(prompts) < len(PROMPTS):
        found = of_prompt(model, rng.integers(0, config["vocab_size"], PROMPTS[len(prompts)]).tolist())
        prompts += [found] if found["min_margin"] >= MARGIN else []
    exact = copy.deepcopy(model).double()
    texts = [torch.tensor([prompt["prompt_ids"] + prompt["greedy_ids"]]) for prompt in prompts]
    error = max((model(text).logits - exact(text).logits).abs().max().item() for text in texts)
    golden = {
        "model": f"models/{NAME}",
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, CPU, "
        "eager attention; logits from one uncached pass over prompt + continuation, whose argmax equals "
        "cached generate() at every step",
        "parameters": model.num_parameters(),
        "weight_seed": SEED,
        "max_abs_logit": round(max(model(text).logits.abs().max().item() for text in texts), 3),
        "float32_vs_float64_max_abs_logit_error": float(f"{error:.1e}"),
        "format": FORMAT,
        "prompts": prompts,
    }
    (DATA / "goldens" / f"{NAME}.json").write_text(json.dumps(golden))
    print(f"{NAME}: margins {[prompt['min_margin'] for prompt in prompts]}, error {error:.1e}")


if __name__ == "__main__":
    main()
