"""The contract half of the SDK in one import: what a plugin implements and what the framework reads. No
torch.
"""

from __future__ import annotations

from plugins.sdk.assembled import AssembledBackend
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager, DeviceProperties
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.memory import Buffer, MemoryManager, MemoryStats, PooledMemory
from plugins.sdk.registry import UnknownBackend, list_backends, load_backend, register_backend
from plugins.sdk.runner import ModelRunner
from plugins.sdk.self_test import SelfTestCheck, run_self_test
from plugins.sdk.tensors import HostTensor, dtype_size
from plugins.sdk.versions import CONTRACT_VERSION, Version, parse_version, version_in_range

__all__ = [
    "CONTRACT_VERSION",
    "AssembledBackend",
    "Backend",
    "Buffer",
    "CapabilityReport",
    "Collectives",
    "Coverage",
    "DeviceManager",
    "DeviceProperties",
    "HostDevices",
    "HostMemory",
    "HostTensor",
    "LinkCapability",
    "MemoryManager",
    "MemoryStats",
    "ModelRunner",
    "OperatorCapability",
    "PluginInfo",
    "PooledMemory",
    "RunnerContext",
    "SelfTestCheck",
    "UnknownBackend",
    "Version",
    "dtype_size",
    "list_backends",
    "load_backend",
    "parse_version",
    "register_backend",
    "run_self_test",
    "version_in_range",
]
