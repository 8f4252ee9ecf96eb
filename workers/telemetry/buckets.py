"""Bounds of histograms' buckets, by what they hold.

Owns nothing but numbers. They are a contract with dashboards and rules: `histogram_quantile` over
old and new bounds at once means nothing.
"""

from __future__ import annotations

# Of one step of a model.
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Between two tokens of a stream.
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
# Of a request, or a part of it.
REQUEST_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1800.0,
)  # fmt: skip
# Tokens of a request.
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
# Tokens, or sequences, of a step.
STEP_TOKENS = (
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
)  # fmt: skip
# Tokens of one verification, and drafts before it.
DRAFT_LENGTHS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 32.0)
