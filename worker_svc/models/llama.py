"""Llama, and what differs from it by weights or by the configuration alone: Mistral's window, Qwen2's biases;
Qwen3 adds norms of query and key.
"""

from __future__ import annotations

from worker_svc.models.decoder import DecoderFamily
from worker_svc.models.parts import normed_attention

LLAMA = DecoderFamily()
QWEN3 = DecoderFamily(attention=normed_attention)
