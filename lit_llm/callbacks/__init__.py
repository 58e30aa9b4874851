"""What watches or guards a run."""

from lit_llm.callbacks.checkpoints import RunCheckpoint
from lit_llm.callbacks.predictions import PredictionWriter
from lit_llm.callbacks.progress import ProgressLines
from lit_llm.callbacks.run_config import SaveConfig

__all__ = ["PredictionWriter", "ProgressLines", "RunCheckpoint", "SaveConfig"]
