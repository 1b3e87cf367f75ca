"""Tool calls as DeepSeek-V4 writes them: read from a stream of text, checked, and written.

Nothing here does input or output, or knows an engine.
"""
