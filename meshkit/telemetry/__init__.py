"""Traces, metrics and logs of one service."""
