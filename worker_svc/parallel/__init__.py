"""Several ranks that run one model together: places, groups, and what travels within a step."""
