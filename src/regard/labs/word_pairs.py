"""Sentences with a word and the noun it refers to, annotated, for the lab `what_heads_do`.

Why: to test whether a head finds a pronoun's antecedent, a verb's subject or what an adjective
describes, the answer must be known, and must not always be the nearest noun.

How: `^` marks the word, `*` the noun that it belongs to, and `~` each other noun before the word.
Gender, number or animacy decides a pronoun's antecedent, so it is known when the pronoun is read,
and adjectives come after their nouns, so that a causal model can answer. Of every five sentences,
two have the noun first and others between it and the word, two have one noun before it and one
between, and one has it nearest but not first.

Left out: sentences from other sources. These were written for this lab.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MARKED = re.compile(r"([~*^])(\w+)")

PRONOUNS = """\
*Mary met ~John at the ~station, and ^she smiled at once.
The *boys saw a ~lion at the ~zoo, and ^they shouted with joy.
The *king sent the ~queen a ~letter, but ^he forgot the stamp.
*Anna bought a ~bicycle from her ~uncle, and ^she rode home.
The *waiter brought the ~lady some ~soup before ^he sat down.
The *birds left the ~tree in the ~park when ^they heard thunder.
The *actress thanked her ~husband and the ~audience before ^she left the stage.
*Tom gave ~Susan an old ~watch because ^he liked to give presents.
The *farmers sold the ~horse to a ~stranger, for ^they needed money.
The *nun taught the ~boy a ~song while ^she swept the floor.
The *policeman followed the ~woman to the ~bridge, where ^he stopped.
The *students asked the ~teacher about the ~exam because ^they were worried.
My *grandmother told the ~doctor about her ~knee until ^she grew tired.
The *letters lay under the ~lamp on the ~desk until ^they were burned.
The *duke showed the ~princess his ~castle, and ^he praised every tower.
The *sisters wrote to their ~father in ~March because ^they missed home.
*Peter waited for ~Helen at the ~harbour until ^he felt cold.
The *soldiers crossed the ~river near the ~village before ^they rested.
The *girl lent her ~brother a ~pencil, and ^she wanted it back.
The *apples fell from the ~basket onto the ~road, and ^they rolled away.
The *monk answered the ~widow with a ~smile, for ^he knew the truth.
The *ladies admired the ~painter and his ~portrait, and ^they paid well.
*Laura called the ~plumber about the ~sink because ^she needed help.
The *guests praised the ~cook for the ~dinner before ^they went home.
In the ~evening the *girl met her ~uncle, and ^she told a story.
At the ~market the *farmers praised the ~horse, and ^they bought hay.
The ~boy gave his *mother a ~flower, and ^she was pleased.
The ~teacher read the *girls a ~poem, and ^they listened in silence.
~John wrote *Mary a long ~letter, which ^she never opened.
The ~waitress showed the *man a ~table, and ^he sat down.
The ~captain handed the *sailors a ~rope, and ^they pulled hard.
After ~lunch *Peter drove ~Anna home because ^he had a car.
The ~nurse gave the *boy a ~spoon, but ^he refused to eat.
During the ~war the *women worked in the ~factory, and ^they earned little.
The ~queen lent the *poet a ~book, and ^he read all night.
The ~shepherd drove the *lambs through the ~gate, and ^they cried.
On ~Monday the *actress met the ~king, and ^she bowed to the ground.
The ~girl bought her *father a ~hat, but ^he never wore it.
A ~stranger asked the *nuns about the ~road, and ^they pointed north.
The ~clerk sold *Helen the last ~ticket, and ^she thanked the man.
Near the ~church an old *woman fed a ~dog until ^she grew cold.
The ~mother told her *sons a ~tale before ^they fell asleep.
In ~spring the *bees visit the ~garden, where ^they work all day.
The ~lawyer showed the *widow a ~paper, and ^she signed it.
The ~lady paid the *gardener with a ~coin, and ^he laughed aloud.
My ~aunt sent the *twins a ~parcel, and ^they opened it at once.
The ~bride danced with her *father in the ~hall until ^he was tired.
The ~prince asked the *maid for a ~candle, but ^she had none.
The ~boy visited his *aunt because ^she was ill.
The ~woman scolded the *boys when ^they shouted in the street.
The ~girls followed the *king until ^he turned around.
~Tom trusted *Susan because ^she never lied.
The ~man fed the *ducks while ^they swam in the pond.
The ~queen dismissed the *general before ^he could speak.
The ~hunter saw two *wolves before ^they saw the hunter.
The ~children loved the *witch although ^she was strange.
The ~mayor greeted the *visitors when ^they arrived at the hall.
~Alice ignored her *brother, though ^he called twice.
The ~crowd cheered the *singer because ^she sang so well.
The ~girl watched the *clouds until ^they turned red.
"""

VERBS = """\
The *keys to the ~cabinet ^are on the table.
The *boy with the red ~balloons ^runs home.
The *captain of the two ~ships ^sleeps below.
The *letters from my ~sister ^arrive late.
The *roof of the old ~houses ^leaks badly.
The *author of these ~books ^lives abroad.
The *dogs behind the ~fence ^bark at night.
The *path between the ~trees ^leads to a lake.
The *woman in the ~photographs ^smiles sadly.
The *windows of the ~church ^break easily.
The *king of the ~islands ^rules alone.
The *lady who knows the ~parents ^speaks slowly.
The *flowers near the ~wall ^need water.
The *train to the northern ~cities ^leaves at noon.
The *students who like the ~teacher ^work hard.
The *sound of the ~bells ^wakes the baby.
The *stories about the ~war ^make us sad.
The *man beside the ~girls ^carries a lamp.
The *price of the ~apples ^rises every week.
The *birds on the ~roof ^sing loudly.
The *doctor for the ~soldiers ^writes a report.
The *children of the ~farmer ^play in the barn.
The *colour of the ~curtains ^suits the room.
The *horses from the ~village ^pull the cart.
In the ~morning the *girl with the ~dogs ^walks to school.
On ~Sundays the *bells of the ~church ^ring early.
After the ~storm the *boats in the ~harbour ^drift apart.
Near the ~river the *house of my ~uncles ^stands empty.
During the ~winter the *wolves from the ~hills ^come closer.
In this ~town the *owner of the ~shops ^pays no tax.
At ~night the *guards of the ~prison ^drink tea.
Under the ~bridge the *boy with the ~fish ^waits for us.
For the ~guests the *cook of the ~hotel ^bakes a cake.
In ~spring the *leaves of this ~tree ^grow fast.
By the ~door the *statue of the ~queens ^looks at visitors.
At the ~market the *women from the ~coast ^sell salt.
In the ~story the *sons of the ~giant ^steal a ring.
Along the ~road the *lamps of the ~city ^shine all night.
Before ~dinner the *father of the ~twins ^reads the paper.
In the ~garden the *cats of our ~neighbour ^chase mice.
On the ~stage the *dancer in the ~boots ^turns twice.
Without ~rain the *fields around the ~farm ^turn brown.
At ~school the *teacher of the ~boys ^tells jokes.
Across the ~lake the *smoke of the ~fires ^rises slowly.
In ~summer the *streets near the ~station ^smell of bread.
Behind the ~curtain the *actors of the ~play ^whisper to each other.
Over the ~hill the *voice of the ~singers ^carries far.
In ~court the *lawyers of the ~company ^ask for time.
In the ~forest the *wind ^howls all night.
At ~noon the *workers ^rest in the shade.
On the ~table the *candle ^burns low.
After ~school the *boys ^swim in the lake.
In the ~kitchen the *water ^boils over.
Near the ~window the *baby ^sleeps quietly.
In ~autumn the *geese ^fly south.
On ~Friday the *shop ^closes early.
Behind the ~barn the *pigs ^eat turnips.
From the ~tower the *guard ^sees everything.
In the ~box the *coins ^shine like gold.
Under the ~snow the *seeds ^wait for spring.
"""

ADJECTIVES = """\
The *soup in the ~bowls is ^cold, so nobody eats it.
The *walls of the ~kitchen are ^yellow and need paint.
The *answer to your ~questions was ^wrong, as we all know.
The *boy beside the ~teachers looks ^tired and wants to sleep.
The *knives in the ~drawer are ^sharp and cut well.
The *water under the ~bridge seems ^deep to those who swim.
The *shoes of the ~dancer were ^wet after the storm.
The *girl between her ~parents was ^happy and began to sing.
The *stairs to the ~cellar are ^dark, so take a lamp.
The *fire in the ~mountains was ^visible from the sea.
The *bread from the ~bakery is still ^warm and smells good.
The *letter about the ~money was ^short but clear.
The *streets around the ~church are ^narrow and full of people.
The *dog near the ~lambs is ^asleep in the sun.
The *pears on the ~tree are not yet ^ripe enough to eat.
The *man who sold the ~horses was ^rich and had many servants.
The *sky above the ~roofs turned ^grey before the rain.
The *wine in the ~glasses tastes ^sour, so we drink water.
The *queen of the ~islands grew ^old and lost her power.
The *beds in the ~hotel were ^soft and very clean.
The *road through the ~hills is ^dangerous at night.
The *music from the ~window sounded ^sad to my ears.
The *children behind the ~wall were ^quiet for an hour.
The *coat with the ~buttons is too ^expensive for me.
In the ~morning the *grass around the ~house is ^wet with dew.
After the ~battle the *soldiers on the ~hill were ^thirsty and asked for water.
The ~cook found the *fish in the ~bucket still ^alive and let it go.
She painted the ~room and left the *door to the ~garden ^open all day.
By ~evening the *bread on the ~shelf was ^hard as stone.
In ~winter the *lake behind the ~farm is ^frozen for weeks.
The ~boys left the *gate of the ~field ^open, and the cows ran away.
At the ~fair the *prices of the ~toys were ^high, so we bought none.
For a ~child the *stairs of the ~tower are ^steep and hard to climb.
On the ~ship the *food for the ~sailors was ^bad and made them ill.
The ~sun made the *roof of the ~car ^hot to the touch.
During the ~speech the *people in the ~hall were ^silent and stood still.
In that ~country the *laws about ~water are ^strict and old.
The ~judge thought the *story of the ~thief ^false in every word.
At ~dinner the *wife of the ~mayor looked ^pale and said little.
Without a ~map the *way to the ~castle is ^long and hard to find.
The ~storm left the *streets of the ~town ^empty for days.
In the ~picture the *eyes of the ~cat are ^green and bright.
From the ~train the *houses by the ~sea look ^tiny to us.
The ~doctor found the *heart of the ~patient ^weak but steady.
Before the ~race the *horse in the ~stable was ^nervous and would not eat.
The ~maid keeps the *windows of the ~palace ^clean for the king.
In ~August the *plums in our ~garden are ^sweet and full of juice.
The ~news made the *father of the ~bride ^angry at everyone.
In the ~mountains the *air is ^thin and cold.
The ~teacher called the *answer ^correct and went on.
On the ~beach the *sand was ^white as snow.
At ~night the *forest is ^black and full of sounds.
The ~queen found the *poem ^dull and fell asleep.
After the ~rain the *road is ^muddy for a week.
In the ~desert the *nights are ^cold and the days are hot.
The ~boys painted the *fence ^red and the gate blue.
For the ~party the *hall was ^bright with lamps.
The ~sugar made the *tea ^sweet, as she likes it.
In ~war the *truth is ^rare and hard to find.
The ~heat made the *children ^lazy until the evening.
"""

Span = tuple[int, int]
"""A span of characters: the first one, and the one after the last."""


@dataclass(frozen=True)
class Sentence:
    """A text, the word in question, its noun, and all nouns before the word in order."""

    text: str
    asked: Span
    gold: Span
    nouns: tuple[Span, ...]

    @property
    def nearest(self) -> Span:
        return self.nouns[-1]

    @property
    def first(self) -> Span:
        return self.nouns[0]


def read_sentence(marked: str) -> Sentence:
    """Parse a sentence with the marks ^, * and ~."""
    spans: dict[str, list[Span]] = {"~": [], "*": [], "^": []}
    nouns = []
    for removed, found in enumerate(_MARKED.finditer(marked)):
        start = found.start() - removed
        span = start, start + len(found[2])
        spans[found[1]].append(span)
        if found[1] != "^":
            nouns.append(span)
    text = _MARKED.sub(r"\2", marked)
    if len(spans["^"]) != 1 or len(spans["*"]) != 1 or nouns[-1] > spans["^"][0]:
        raise ValueError(
            f"{marked!r}: expected one ^ before the word that is asked about, and before it one * "
            "at its noun"
        )
    return Sentence(text, spans["^"][0], spans["*"][0], tuple(nouns))


def read_sentences(marked: str) -> list[Sentence]:
    return [read_sentence(line) for line in marked.splitlines()]


RELATIONS: dict[str, Sequence[Sentence]] = {
    "pronoun": read_sentences(PRONOUNS),
    "verb": read_sentences(VERBS),
    "adjective": read_sentences(ADJECTIVES),
}
"""Sentences by relation: a pronoun's antecedent, a verb's subject, an adjective's noun."""
