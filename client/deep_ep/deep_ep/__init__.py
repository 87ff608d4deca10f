"""deep_ep over epd: the interface of DeepEP's first version, with the epd daemon behind it.

    from deep_ep import Buffer, Config, EventOverlap

Normal and low-latency mode of one node, on GPUs and on host devices. README.md beside this package tells what
differs from DeepEP, and what is not served.
"""

from .buffer import Buffer
from .config import Config
from .events import EventHandle, EventOverlap
from .layout import topk_idx_t

__version__ = "1.2.1+epd.0.1.0"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
