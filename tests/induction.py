"""A text of our own that the shipped model reads with its induction head, the same with every version of Python."""

from __future__ import annotations

import torch

from attlas.recording.atlas import Atlas

TEXT = '''import re


class Template:
    """A text with places that are filled in later."""

    pattern = re.compile(r"[$]([a-z]+)")

    def __init__(self, template):
        self.template = template
        self.names = self.pattern.findall(template)

    def substitute(self, values):
        """Return the text with a value at each place."""
        result = self.template
        for name in self.names:
            result = result.replace("$" + name, str(values[name]))
        return result


def write_letter(template, person):
    letter = Template(template)
    return letter.substitute({"name": person.name, "place": person.place})
'''
# In head 2·4 " p" of `"place": person` looks at "ers", behind the " p" of `"name": person`.
QUERY, KEY = 180, 172


def recorded() -> Atlas:
    """Return the recording of the shipped model on the text, with parts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import attlas.huggingface  # registers "attlas"

    folder = attlas.models.path()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attlas").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad(), attlas.record(model, parts=True, tokens=tokenizer) as atlas:
        model(ids)
    return atlas
