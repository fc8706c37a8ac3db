"""The least time of a token on a card, by its bandwidth, and no model that does not fit."""

import yaml

from kvbook.models import registry
from kvreport.site import inserts, running

SMALL, LARGE = (registry.families()[name].architectures[0] for name in ("smollm2", "llama"))


def told(of_t4: dict, tmp_path, monkeypatch) -> dict[str, str]:
    (tmp_path / "cards.yaml").write_text(yaml.safe_dump({"T4": of_t4 | {"source": "made up"}}))
    monkeypatch.setattr(running.places, "DATA", tmp_path)
    lines = [line.replace('"', "").split(",") for line in inserts.PARTS["cards"]().splitlines() if "`" in line]
    return {line[0].strip("`"): line[1] for line in lines if len(line) == 2}


def test_a_token_takes_as_long_as_reading_the_weights_and_what_does_not_fit_is_said_not_to(tmp_path, monkeypatch):
    card = {"memory_gb": 16, "bandwidth_gb_s": 100}
    assert 2 * SMALL.parameters < 1e9 < 2 * LARGE.parameters
    found = told(card, tmp_path, monkeypatch)
    assert float(found[SMALL.hub_id]) == round(2 * SMALL.parameters / 100e6, 1)
    # Control: at half the bandwidth it takes twice as long, and a smaller card holds no large model.
    slower = told(card | {"bandwidth_gb_s": 50, "memory_gb": 1}, tmp_path, monkeypatch)
    assert float(slower[SMALL.hub_id]) == round(2 * SMALL.parameters / 50e6, 1)
    assert slower[LARGE.hub_id] == "does not fit"
