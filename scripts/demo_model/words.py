"""Open word lists. Every list is ours; none has a word that needs a capital unless it is a name."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ANIMALS = _words(
    "cat dog fox owl bear wolf mouse rabbit turtle otter badger heron panda tiger horse goat "
    "sheep duck crow frog whale seal lynx moose raven lizard beaver donkey camel parrot "
    "hedgehog squirrel goose swan eagle hawk deer bison llama ferret gecko toad crane stork "
    "robin sparrow magpie mole"
)
COLORS = _words(
    "red blue green yellow purple orange silver golden white black brown pink gray teal crimson "
    "violet turquoise scarlet amber ivory"
)
FRUITS = _words(
    "apple banana cherry grape lemon mango orange peach pear plum kiwi melon fig lime papaya "
    "apricot pineapple strawberry raspberry blueberry coconut pomegranate"
)
VEGETABLES = _words(
    "carrot potato onion tomato pepper spinach cabbage celery radish pumpkin garlic leek turnip "
    "beet broccoli lettuce cucumber cauliflower"
)
OBJECTS = _words(
    "lamp key book map coin bell kite drum rope mirror basket candle ladder hammer compass "
    "lantern ribbon button bottle clock whistle feather shell stone umbrella telescope teapot "
    "wheel blanket box vase needle spoon barrel letter violin painting notebook suitcase anchor "
    "scarf kettle"
)
PLACES = _words(
    "forest river village harbor mountain garden library market meadow castle island valley "
    "bridge tower cave beach orchard station desert lake mill chapel quarry swamp lighthouse "
    "workshop vineyard square canal cliff"
)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bruno Carla Diego Elena Frank Gina "
    "Hugo Ivan Julia Karl Lena Marco Nina Oscar Petra Ravi Sofia Tom Vera Walter Amir Bella "
    "Chen Dora Emil Fatima Goran Hana Ines Jonas Kira Luis Maya Nils Orla Pablo Rita Sven Tara"
)
CITIES = _words(
    "Paris London Berlin Madrid Rome Tokyo Oslo Vienna Dublin Lisbon Prague Athens Cairo Lima "
    "Delhi Beijing Seoul Ottawa Boston Chicago Denver Sydney Toronto Warsaw Helsinki Stockholm "
    "Brussels Budapest Istanbul Nairobi Havana Bogota Munich Milan Geneva Porto Lyon Naples "
    "Kyoto Osaka Mumbai Bangkok Jakarta Seattle Austin Miami Dallas Montreal"
)
ADJECTIVES = _words(
    "brave quiet clever happy gentle curious proud tiny sleepy swift bright calm lucky wise "
    "jolly kind lonely patient shy bold old young strange careful noisy hungry tired cheerful "
    "stubborn"
)
VERBS_ING = _words(
    "running singing dreaming reading dancing climbing painting cooking fishing writing sailing "
    "swimming digging resting waiting humming"
)
JOBS = _words(
    "baker teacher doctor farmer pilot sailor painter writer singer nurse chef engineer "
    "gardener carpenter tailor plumber lawyer dentist miller shepherd librarian blacksmith "
    "potter clerk"
)
SPORTS = _words("soccer tennis hockey chess golf rugby boxing rowing cycling skiing karate cricket")
TOOLS = _words("hammer saw drill wrench chisel shovel rake pliers screwdriver level axe file")
INSTRUMENTS = _words(
    "piano violin guitar flute drum trumpet cello harp clarinet banjo oboe accordion"
)
LANGUAGES = _words("French German Spanish Italian Greek Polish Dutch Danish Turkish Hindi")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
SEASONS = _words("spring summer autumn winter")
OTHER_NOUNS = _words(
    "planet window paper pencil water bread cheese butter sugar cloud storm snow rain wind "
    "thunder engine rocket train plane boat truck wagon table chair door floor roof wall glass "
    "metal wood plastic cotton wool silk leather music dance song story poem number circle "
    "triangle morning evening night noon week month year hour minute second friend family "
    "mother father sister brother baby child king queen prince knight dragon wizard magic sword "
    "shield crown ring gold copper iron steel bronze tin salt honey milk tea coffee juice soup "
    "pasta rice bean corn wheat nut seed leaf root branch flower grass bush tree vine moss fern "
    "report budget meeting invoice project server database network camera battery screen ticket "
    "parcel garage kitchen hallway office folder schedule contract survey recipe journey island "
    "puzzle signal voltage"
)
WORDS = tuple(
    sorted(
        {*ANIMALS, *COLORS, *FRUITS, *VEGETABLES, *OBJECTS, *PLACES, *JOBS, *SPORTS, *ADJECTIVES}
    )
)
ALL_WORDS = tuple(sorted({*WORDS, *OTHER_NOUNS, *TOOLS, *INSTRUMENTS}))

CATEGORIES: dict[str, tuple[str, ...]] = {
    "fruits": FRUITS,
    "animals": ANIMALS,
    "colors": COLORS,
    "vegetables": VEGETABLES,
    "sports": SPORTS,
    "jobs": JOBS,
    "tools": TOOLS,
    "instruments": INSTRUMENTS,
    "cities": CITIES,
    "first names": NAMES,
    "months": MONTHS,
    "languages": LANGUAGES,
}
THINGS_IN: dict[str, tuple[str, ...]] = {
    "a forest": _words(
        "trees moss mushrooms ferns birds squirrels leaves roots deer berries ants stones"
    ),
    "a kitchen": _words(
        "pots pans spoons knives plates cups a:stove a:sink a:fridge bowls forks towels"
    ),
    "an office": _words("desks chairs pens paper computers printers folders lamps phones shelves"),
    "a garden": _words(
        "flowers grass bees worms bushes a:hedge a:bench herbs trees soil butterflies"
    ),
    "a classroom": _words("desks books pencils a:board chalk maps rulers chairs students a:clock"),
    "a beach": _words("sand shells waves crabs towels umbrellas boats seagulls stones driftwood"),
    "a toolbox": _words("a:hammer nails screws a:saw pliers a:wrench tape a:drill a:level a:file"),
    "a bathroom": _words(
        "soap towels a:mirror a:sink a:bathtub toothbrushes shampoo a:sponge a:comb"
    ),
    "a farm": _words("cows hens a:barn hay tractors goats fences pigs fields a:well eggs horses"),
    "a library": _words(
        "books shelves maps lamps tables readers newspapers a:globe chairs journals"
    ),
    "a harbor": _words("boats ropes anchors nets gulls cranes sailors barrels a:lighthouse ships"),
    "a bakery": _words("bread cakes flour ovens rolls cookies trays pies butter sugar yeast"),
    "a hospital": _words("doctors nurses beds medicine bandages masks gloves patients charts"),
    "a train station": _words(
        "trains platforms tickets clocks benches travelers suitcases signs tracks"
    ),
    "a backpack": _words("books a:bottle a:jacket snacks a:map pens a:notebook keys a:flashlight"),
    "the sky": _words("clouds birds stars the:moon the:sun planes kites rainbows balloons"),
    "the desert": _words("sand cactuses camels dunes lizards rocks scorpions snakes wind"),
    "a river": _words("fish stones reeds frogs ducks water sand boats otters mud"),
    "a supermarket": _words(
        "bread milk shelves carts cheese fruit vegetables baskets eggs rice soap"
    ),
    "a museum": _words("paintings statues guides visitors maps coins bones vases masks swords"),
}
THINGS_IN = {
    place: tuple(thing.replace(":", " ") for thing in things) for place, things in THINGS_IN.items()
}
