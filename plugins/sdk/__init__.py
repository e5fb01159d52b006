"""All that a chip plugin imports. This package and its contract half (`plugins.sdk.contract`) import no
torch.
"""

from __future__ import annotations
