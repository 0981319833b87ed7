"""Campaigns: trials of tfpreempt under random faults, with the seed of each trial kept.

`python -m campaigns` runs them; each module with a `CAMPAIGN` is one campaign. Their
short forms, and the tests of the campaigns, are in `tests/campaigns/`.
"""
