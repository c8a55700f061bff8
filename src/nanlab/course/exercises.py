"""Checks of the exercises. Each takes the reader's answer, prints why it is right or what is missing, returns a bool.

A check runs the answer on inputs and compares values with a reference of its own; it never looks at how it was written.
"""

from __future__ import annotations


def _verdict(problem: str, praise: str) -> bool:
    """Print one sentence; True if there is no problem."""
    print(f"Not yet: {problem}" if problem else f"Right. {praise}")
    return not problem
