"""aprilsched: keeps LLM rollout engines full while a trainer trains.

It over-provisions rollouts, delivers a batch when enough of them are complete, pauses the
stragglers, loads a new policy version into the engines, and continues the partial responses. For
every token it records which version sampled it. The method is APRIL (arXiv 2509.18521).
"""

from aprilsched.config import SchedulerConfig
from aprilsched.errors import AprilschedError, MemberLost
from aprilsched.kernel.engines.sglang.http_engine import (
    SGLangFleet,
    SGLangListedFleet,
    workers_of_router,
)
from aprilsched.kernel.engines.vllm.engine import VLLMFleet, VLLMListedFleet
from aprilsched.kernel.shell import PromptQueue, RefitReport, RolloutScheduler, Turn, TurnOutput
from aprilsched.kernel.store import MemoryStore, SqliteStore
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.kernel.weights.delta import DeltaPublisher
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.kernel.weights.distributed import DistributedPublisher
from aprilsched.kernel.weights.external import ExternalWeights, Handshake
from aprilsched.kernel.weights.lora import LoraPublisher
from aprilsched.kernel.weights.tensor import TensorPublisher
from aprilsched.kernel.weights.vllm_transfer import VLLMPublisher
from aprilsched.simulation.engine import SimFleet, SimPublisher
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.trainers.advantages import advantages
from aprilsched.types import (
    Answer,
    Batch,
    Group,
    Media,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Sibling,
)

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AprilschedError",
    "Batch",
    "DeltaPublisher",
    "DiskPublisher",
    "DistributedPublisher",
    "ExternalWeights",
    "Group",
    "Handshake",
    "LongTailWorkload",
    "LoraPublisher",
    "Media",
    "MemberLost",
    "MemoryStore",
    "Prompt",
    "PromptQueue",
    "RefitReport",
    "Rollout",
    "RolloutScheduler",
    "SGLangFleet",
    "SGLangListedFleet",
    "Sample",
    "SamplingParams",
    "SchedulerConfig",
    "Score",
    "Segment",
    "Sibling",
    "SimFleet",
    "SimPublisher",
    "SqliteStore",
    "TensorPublisher",
    "Turn",
    "TurnOutput",
    "VLLMFleet",
    "VLLMListedFleet",
    "VLLMPublisher",
    "__version__",
    "advantages",
    "sampling_params",
    "workers_of_router",
]
