"""A stand-in for Kunlun's runtime, so that the plugin's own code runs on a host. Only on explicit request.

Modules have the vendor's names, signatures, layouts and limits; what the chip would refuse is an error here.
It is written from the vendor's public interface and shares no code with plugins.sdk.reference.
"""

from __future__ import annotations

NOTE = (
    "kunlun_ops, torch_xmlir and XCCL are emulated on the host; device strings, the vendor's libraries, "
    "graph capture, streams, the order of rows within expert layers, what int8 kernels take as maxima, the "
    "rounding and the speed of its kernels are unverified on hardware"
)
"""What lies below the seam (plugins/kunlun/runtime.py) and no emulation can show."""
