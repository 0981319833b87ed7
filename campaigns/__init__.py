"""Campaigns: trials of tfpreempt under random faults; the record keeps each seed.

`python -m campaigns` runs the campaigns; each module with a `CAMPAIGN` is one campaign.
The short forms, and the tests of the campaigns, are in `tests/campaigns/`.
"""
