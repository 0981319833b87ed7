"""The short forms of campaigns, and the trials that found a fault.

A failure says how to repeat its trial.
"""

from __future__ import annotations

import pytest

from campaigns.__main__ import CAMPAIGNS
from campaigns.campaign import Campaign
from tests.conftest import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # imports all campaigns


@pytest.mark.parametrize(
    "campaign",
    [
        pytest.param(each, id=name, marks=getattr(pytest.mark, each.mark))
        for name, each in CAMPAIGNS.items()
        if each.short or each.again
    ],
)
def test_no_trial_breaks_a_promise(campaign: Campaign) -> None:
    wanted = [*campaign.again, *((SEED, number) for number in range(campaign.short))]
    for line in campaign.run(wanted):
        again = f"--seed {line['seed']} --only {line['trial']}"
        repeat = f"python -m campaigns {campaign.name} {again}"
        assert line["fault"] is None, f"{repeat}\n{line['fault']}"
