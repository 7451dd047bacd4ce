"""Label cleaning: which labels of a data set are wrong, and a model trained without them."""

from typing import TYPE_CHECKING, Any

from bilevel.errors.extras import needed

with needed("clean", "sklearn", "scipy"):
    from bilevel.cleaning.estimator import LabelCleaner

if TYPE_CHECKING:
    from bilevel.cleaning.saved import load_model

__all__ = ["LabelCleaner", "load_model"]


def __getattr__(name: str) -> Any:
    """Import ``load_model`` on first use, because it needs more packages than LabelCleaner."""
    if name == "load_model":
        with needed("clean", "pandas", "safetensors", "PIL"):
            from bilevel.cleaning.saved import load_model
        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
