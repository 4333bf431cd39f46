"""faiss, an optional dependency."""

from types import ModuleType


def load_faiss(feature: str) -> ModuleType:
    """Import faiss.

    Raises:
        ImportError: it is not installed; the message says how to install it for the feature.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"{feature} needs faiss: pip install 'manyclass[ann]'") from error
    return faiss
