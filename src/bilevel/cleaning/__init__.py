"""Label cleaning: which labels of a data set are wrong, and a model that did not learn them."""

from bilevel.errors import MissingExtraError

try:
    from bilevel.cleaning.estimator import LabelCleaner
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sklearn":
        raise
    raise MissingExtraError("scikit-learn", "clean") from None

__all__ = ["LabelCleaner"]
