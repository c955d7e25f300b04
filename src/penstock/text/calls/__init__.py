"""Tool calls and reasoning: how models write them, and how their text is divided."""
