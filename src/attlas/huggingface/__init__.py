"""Run Hugging Face models on attlas: importing this module registers attention and mask under ``"attlas"``.

After ``import attlas.huggingface``, a model loaded with ``attn_implementation="attlas"`` (or switched with
``model.set_attn_implementation("attlas")``) gives the same logits as before, and
``model(**inputs, output_attentions=True).attentions[layer]`` is a lazy `AttentionMatrix` instead of a
tensor of m × n numbers per head.

Examples
--------
>>> import torch, attlas.huggingface
>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
>>> model = GPT2LMHeadModel(config).eval()
>>> model.set_attn_implementation("attlas")
>>> output = model(torch.arange(20)[None], output_attentions=True)
>>> len(output.attentions), output.attentions[0].shape
(2, torch.Size([1, 2, 20, 20]))
"""

from attlas.errors import MissingExtraError
from attlas.foundation.installation import install_command

try:
    import transformers
except ImportError as error:
    rule, fix = "transformers must be installed to run its models.", install_command("hf")
    raise MissingExtraError(rule, "no module named transformers", fix, where="attlas.huggingface") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 48):
    rule, fix = "transformers must be of version 4.48 or newer.", "pip install -U 'transformers>=4.48'"
    raise MissingExtraError(rule, f"transformers {transformers.__version__}", fix, where="attlas.huggingface")

from attlas.foundation.compat import registered
from attlas.huggingface import chunked as chunked  # attlas.recording reads it from here
from attlas.huggingface.attention import attention_forward
from attlas.huggingface.copied_configurations import follow_copied_configurations
from attlas.huggingface.layers import modules_without_interface
from attlas.huggingface.mask_function import attention_mask
from attlas.huggingface.masks import LazyMask
from attlas.huggingface.monitor import AttentionMonitor
from attlas.huggingface.output_attentions import accept_output_attentions
from attlas.huggingface.returned import weights_as_tensors

__all__ = [
    "NAME",
    "AttentionMonitor",
    "LazyMask",
    "attention_forward",
    "attention_mask",
    "modules_without_interface",
    "weights_as_tensors",
]

NAME = "attlas"

# Both, under one name: a model whose attention has no mask function of the same name gets no mask at all, and
# padding and windows are then dropped in silence.
registered(transformers, NAME, attention_forward, attention_mask)
accept_output_attentions(NAME)
follow_copied_configurations(NAME)
