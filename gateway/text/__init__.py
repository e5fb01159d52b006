"""Text to tokens and tokens to text: tokenizer, chat template, incremental detokenizer, stop strings. No
torch.
"""

from __future__ import annotations

from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import IncrementalDetokenizer
from gateway.text.pool import TextPool
from gateway.text.stop_matcher import StopMatcher, StopResult
from gateway.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "StopResult", "TextPool", "Tokenizer"]
