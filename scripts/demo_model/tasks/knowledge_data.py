"""What the model knows for a fact."""

from __future__ import annotations

from pathlib import Path

_CAPITALS = """
France Paris, Germany Berlin, Spain Madrid, Italy Rome, Japan Tokyo, Norway Oslo, Austria Vienna,
Ireland Dublin, Portugal Lisbon, Greece Athens, Egypt Cairo, Peru Lima, India New_Delhi,
China Beijing, Canada Ottawa, Australia Canberra, Poland Warsaw, Finland Helsinki,
Sweden Stockholm, Belgium Brussels, Hungary Budapest, Turkey Ankara, Kenya Nairobi, Cuba Havana,
Colombia Bogota, Brazil Brasilia, Argentina Buenos_Aires, Chile Santiago, Denmark Copenhagen,
Iceland Reykjavik, Russia Moscow, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Croatia Zagreb,
Serbia Belgrade, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, Nepal Kathmandu, Iran Tehran,
Iraq Baghdad, Morocco Rabat, Ghana Accra, Nigeria Abuja, Ethiopia Addis_Ababa, Ecuador Quito,
Uruguay Montevideo, Mexico Mexico_City, Mongolia Ulaanbaatar, Jordan Amman, Lebanon Beirut,
Switzerland Bern, South_Korea Seoul, New_Zealand Wellington, Slovakia Bratislava, Estonia Tallinn
"""
CAPITALS: dict[str, str] = {}
for _pair in _CAPITALS.replace("\n", " ").split(","):
    _country, _city = _pair.split()
    CAPITALS[_country.replace("_", " ")] = _city.replace("_", " ")
CAPITALS |= {
    "the Netherlands": "Amsterdam",
    "the United Kingdom": "London",
    "the United States": "Washington",
    "the Czech Republic": "Prague",
}

# A line: questions with the same answer, without their marks; the answer; what it turns on.
_LINES = (Path(__file__).parent / "facts.txt").read_text(encoding="utf-8").splitlines()
FACTS = tuple(
    (tuple(asked.split(" | ")), answer, key)
    for asked, answer, key in (line.split(" => ") for line in _LINES)
)
_OPPOSITES = (
    "hot cold, up down, big small, fast slow, light dark, early late, open closed, hard soft, "
    "full empty, wet dry, rich poor, strong weak, loud quiet, young old, happy sad, near far"
)
OPPOSITES = tuple(tuple(pair.split()) for pair in _OPPOSITES.split(", "))
