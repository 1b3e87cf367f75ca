"""Conversations to prompts in DeepSeek-V4's format, and answers back from tokens.

Nothing here does input or output but for reading a checkpoint's files, or knows an engine.
"""
