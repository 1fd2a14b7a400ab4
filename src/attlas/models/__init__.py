"""The small trained model that ships with the package."""

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """
    Folder of the trained GPT-2 that ships with attlas.

    A Hugging Face folder: weights, configuration, tokenizer and a card (``README.md``) that says what the model was
    trained on, how well it does and which of its heads do what.

    Returns
    -------
    pathlib.Path
        The folder ``python-gpt2``. Nothing is loaded.

    Examples
    --------
    >>> import attlas.models
    >>> attlas.models.path().name
    'python-gpt2'
    """
    return Path(__file__).parent / "python-gpt2"
