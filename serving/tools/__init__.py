"""Tools: how models write calls, how they are found in an answer, and how they are enforced."""
