"""Reading data, and batches of it."""

from mytorch.data.dataset import ArrayDataset, Dataset
from mytorch.data.idx import load_idx
from mytorch.data.loader import DataLoader

__all__ = ["ArrayDataset", "DataLoader", "Dataset", "load_idx"]
