"""What watches or guards a run."""

from lit_llm.callbacks.checkpoints import RunCheckpoint
from lit_llm.callbacks.monitor import RankMonitor
from lit_llm.callbacks.predictions import PredictionWriter
from lit_llm.callbacks.progress import ProgressLines
from lit_llm.callbacks.replicas import ReplicaCheck
from lit_llm.callbacks.run_config import SaveConfig
from lit_llm.callbacks.trace import TraceCapture
from lit_llm.callbacks.weight_average import WeightAverage

__all__ = [
    "PredictionWriter",
    "ProgressLines",
    "RankMonitor",
    "ReplicaCheck",
    "RunCheckpoint",
    "SaveConfig",
    "TraceCapture",
    "WeightAverage",
]
