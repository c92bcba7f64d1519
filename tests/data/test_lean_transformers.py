"""What a process imports that needs a tokenizer alone, and that nothing is missing from it afterwards."""

import importlib.metadata
import subprocess
import sys

from dagrl.data.lean_transformers import who_brings

PROGRAM = """
import importlib.metadata, importlib.util, sys
from dagrl.data.tokenizer import make_tokenizer
from dagrl.config.schema import TokenizerSpec

whole = importlib.metadata.packages_distributions
tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
assert tokenizer.decode(tokenizer.encode("3+4=")) == "3+4="
found = {"torch", "sklearn", "transformers.modeling_gguf_pytorch_utils"} & sys.modules.keys()
assert not found, f"a tokenizer has imported {found}"
assert importlib.metadata.packages_distributions is whole

import transformers.tokenization_utils_tokenizers as tokenizers
from transformers.utils import import_utils

found = import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert found["torch"] == ["torch"] and found["yaml"] == ["PyYAML"], found
assert found.get("yaml") == ["PyYAML"] and found.get("no_such_module", 1) == 1
assert import_utils.is_torch_available() and import_utils.get_torch_version() == importlib.metadata.version("torch")
try:
    tokenizers.load_gguf_checkpoint("no such file")
except (ImportError, OSError):
    pass  # the real one says that gguf is not installed, or that there is no such file
import transformers.modeling_gguf_pytorch_utils as gguf
assert importlib.util.find_spec(gguf.__name__).origin == gguf.__file__
assert "torch" in sys.modules
"""


def test_a_tokenizer_needs_no_torch_and_leaves_everything_where_it_was():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_who_brings_a_module_is_known_without_a_look_at_files():
    whole = importlib.metadata.packages_distributions()
    for module in ("torch", "yaml", "PIL", "six", "google", "flash_attn", "_pytest", "no_such_module"):
        assert who_brings(module) == whole.get(module, []), module
