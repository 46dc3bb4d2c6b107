"""A small grammar of short stories and of cards about their animals, which generates the training text of the bundled
model.

A story has a hero, a friend, a thing and a place, which stay the same in the whole story. Choices are skewed: one
option is the favourite (often a different one for each kind of hero), and the others share the remaining probability.
So every beginning has a clear most likely continuation, and there is still enough variety that names must be copied
from the context rather than memorised.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FAVOURITE_SHARE = 0.75  # the probability of the favourite; the other options share the rest equally
VARIED_SHARE = 0.4  # the same for names, animals and things, which have many options
CHAPTERS_SHARE = 0.1  # the share of stories that have more than one chapter
MAX_CHAPTERS = 10
COLLECTION_SHARE = 0.1  # the share of documents that contain several stories
CARD_SHARE = 0.25  # the share of documents that are cards; cards are short, about a twentieth of the text

ANIMALS = (
    "fox",
    "rabbit",
    "bear",
    "mouse",
    "raccoon",
    "frog",
    "duck",
    "cat",
    "hedgehog",
    "squirrel",
    "turtle",
    "badger",
)
ADJECTIVES = ("little", "brave", "clever", "gentle", "young", "shy", "quiet", "cheerful")
GIRLS = ("Lily", "Mia", "Nora", "Daisy", "Ruby", "Clara", "Hazel", "Poppy", "Willow", "Maple", "Ivy", "Stella")
BOYS = ("Pip", "Tom", "Max", "Oliver", "Felix", "Bruno", "Jasper", "Milo", "Oscar", "Toby", "Leo", "Theo")
FRIENDS = ("Bella", "Sam", "Rosie", "Hugo", "Penny", "Finn", "Coco", "Archie", "Luna", "Otto", "Tilly", "Gus")
HOMES = (
    "near the river",
    "in the forest",
    "on the green hill",
    "by the sea",
    "in the meadow",
    "under the old bridge",
    "beside the lake",
    "at the edge of the village",
)
COLOURS = ("red", "blue", "green", "yellow", "golden", "silver", "purple", "white")
THINGS = ("kite", "ball", "drum", "lantern", "boat", "key", "book", "bell", "hat", "basket", "scarf", "whistle")
FOODS = ("apple pie", "honey cake", "carrot soup", "berry jam", "warm bread", "nut cookies")
WEATHERS = ("sunny", "windy", "rainy", "cold", "foggy", "snowy")
HIDING_PLACES = (
    "under the bed",
    "behind the door",
    "in a hollow tree",
    "beneath a pile of leaves",
    "on top of the roof",
    "between two big stones",
)

# A story consists of an opening and a plot. Both are tuples of alternatives for each sentence, the favourite first. ""
# leaves a sentence out.
Sentences = tuple[tuple[str, ...], ...]

OPENING: Sentences = (
    (
        "Once upon a time, there was a {adjective} {animal} named {name}.",
        "The {adjective} {animal} was named {name}.",
        "Once there was a {adjective} {animal}, and everyone called {him} {name}.",
        "There once was a {adjective} {animal} named {name}.",
        "{name} was a {adjective} {animal}.",
        "Long ago, a {adjective} {animal} named {name} was born.",
    ),
    ("{name} lived {home}.", "{He} lived {home} with {his} family.", "{His} house was {home}.", ""),
)

NEXT_CHAPTER: Sentences = (
    (
        "The next day was {weather}, and {name} woke up early.",
        "A week later, {name} went out for a walk.",
        "But that was not the end of the story of {name}.",
    ),
)

LOST: Sentences = (
    (
        "{name} had a {colour} {thing} that {he} loved very much.",
        "More than anything, {name} loved {his} {colour} {thing}.",
    ),
    ("One {weather} morning, the {thing} was gone.", "One {weather} day, {he} could not find the {thing}."),
    ("{He} looked {hiding_place}, but it was not there.", "{name} sat down and began to cry.", ""),
    ("Then {he} met a {friend_animal} named {friend}.", "Soon a kind {friend_animal} named {friend} came by."),
    ('"Can you help me find my {thing}?" asked {name}.', '"I have lost my {thing}," said {name}.'),
    ('"Yes, I can help you," said {friend}.', '"Do not worry," said {friend}.'),
    (
        "Together they found the {colour} {thing} {other_hiding_place}.",
        "At last they saw the {thing} {other_hiding_place}.",
    ),
    (
        "{name} was so happy that {he} gave {friend} a big hug.",
        "From that day on, {name} and {friend} were best friends.",
    ),
)

STORM: Sentences = (
    ("One evening, a big storm came.", "One night, the wind began to blow and the rain began to fall."),
    ("{name} heard a knock at the door.", "There was a knock at the door, and {name} was afraid.", ""),
    (
        "It was a {friend_animal} named {friend}, cold and wet.",
        "Outside stood {friend} the {friend_animal}, all alone.",
    ),
    ('"May I come in?" asked {friend}.', '"I have lost my way," said {friend}.'),
    ('"Of course," said {name}, and opened the door.', '"Come and sit by the fire," said {name}.'),
    (
        "{name} gave {friend} some {food} and a {colour} blanket.",
        "They shared some {food} and told each other stories.",
    ),
    ("In the morning, the sun was shining.", "When the storm was over, they both went outside to play.", ""),
    ('"Thank you for being so kind," said {friend}.', '"You are a true friend," said {friend}.'),
)

BAKING: Sentences = (
    ("One {weather} day, {name} wanted to make some {food}.", "{name} liked {food} more than anything."),
    ("{He} worked all morning in the kitchen.", "{He} sang a song while {he} worked.", ""),
    ("The {food} smelled so good that a {friend_animal} named {friend} came to the window.",),
    ('"What is that lovely smell?" asked {friend}.', '"I am so hungry," said {friend}.'),
    ('"It is {food}," said {name}. "Would you like some?"', '"There is enough for two," said {name}.'),
    ("They sat down together and ate it all.", "{name} gave half of it to {friend}."),
    ("{friend} gave {name} a {colour} {thing} to say thank you.", "After that, {friend} came to visit every day."),
    ("{name} learned that it is good to share.", "It was the best day of all."),
)

FOUND: Sentences = (
    (
        "One {weather} morning, {name} found a {colour} {thing} {hiding_place}.",
        "While playing, {name} found a {colour} {thing}.",
    ),
    ("It was the most beautiful {thing} {he} had ever seen.", '"I wonder whose {thing} this is," said {name}.'),
    ("{name} wanted to keep it, but {he} knew that was not right.", ""),
    ("So {he} asked everyone, and at last {he} came to {friend} the {friend_animal}.",),
    ('"Is this your {thing}?" asked {name}.', '"Did you lose a {colour} {thing}?" asked {name}.'),
    ('"Yes, it is mine!" said {friend}. "Thank you so much."', '"You found my {thing}!" said {friend}.'),
    (
        "{friend} was so glad that they played with the {thing} until the sun went down.",
        "They had some {food} together.",
    ),
    ("{name} went home with a happy heart.", "{name} was proud, because {he} had done the right thing."),
)

RACE: Sentences = (
    ("One {weather} day, {friend} the {friend_animal} wanted to have a race.", "{name} loved to run and jump all day."),
    ('"I am faster than you," said {friend}.', '"Let us run to the big tree," said {friend} the {friend_animal}.'),
    ('"We will see," said {name}.', '"I will try my best," said {name}.'),
    ("They ran and ran, past the {colour} flowers and over the stones.", "All the animals came to watch."),
    ("Then {friend} fell and hurt a foot.", "But {friend} slipped and fell into the mud."),
    ("{name} stopped and went back to help.", "{name} did not run on, but stopped to help.", ""),
    ("They walked to the end of the race together.", "Side by side, they went home to eat {food}."),
    ('"You are the real winner," said {friend}.', "{friend} never forgot how kind {name} had been."),
)

BUILDING: Sentences = (
    ("{name} wanted to build a house for {his} {colour} {thing}.", "One day, {name} began to build a little house."),
    ("{He} worked hard, but the walls fell down.", "The work was too hard for one small {animal}."),
    (
        "A {friend_animal} named {friend} was watching.",
        "Along came {friend} the {friend_animal}.",
    ),
    ('"Two are stronger than one," said {friend}.', '"Let me help you," said {friend}.'),
    ("{name} held the wood while {friend} used the hammer.", "They worked together until it was dark.", ""),
    ("In the end, the house was strong and tall.", "Soon the house was done, and it had a {colour} door."),
    ("They had a party with {food} for all their friends.", "{name} put the {thing} inside and smiled."),
    ("That night, {name} slept very well.", '"We make a good team," said {name}.'),
)

PLOTS = (LOST, STORM, BAKING, FOUND, RACE, BUILDING)


@dataclass(frozen=True, slots=True)
class Hero:
    animal: str
    name: str
    is_girl: bool

    def words(self) -> dict[str, str]:
        """Return the words that describe the hero, by their names in the sentences."""
        he, him, his = ("she", "her", "her") if self.is_girl else ("he", "him", "his")
        return {
            "animal": self.animal,
            "name": self.name,
            "he": he,
            "him": him,
            "his": his,
            "He": he.title(),
            "His": his.title(),
        }


def choose(rng: random.Random, options: Sequence[T], favourite: int = 0, share: float = FAVOURITE_SHARE) -> T:
    """Return one of the options: the one at index `favourite`, modulo their number, with the probability `share`."""
    favourite %= len(options)
    if len(options) == 1 or rng.random() < share:
        return options[favourite]
    return options[(favourite + rng.randrange(1, len(options))) % len(options)]


def choose_hero(rng: random.Random) -> Hero:
    animal = choose(rng, ANIMALS, share=VARIED_SHARE)
    taste = ANIMALS.index(animal)
    is_girl = choose(rng, (False, True), taste)
    return Hero(animal, choose(rng, GIRLS if is_girl else BOYS, taste, VARIED_SHARE), is_girl)


def choose_words(rng: random.Random, hero: Hero) -> dict[str, str]:
    """Return the words that fill the sentences about this hero. Every kind of hero has its own favourites."""
    taste = ANIMALS.index(hero.animal)
    friend_animal = choose(rng, [animal for animal in ANIMALS if animal != hero.animal], taste + 1, VARIED_SHARE)
    hiding_place = choose(rng, HIDING_PLACES, taste)
    return hero.words() | {
        "home": choose(rng, HOMES, taste),
        "colour": choose(rng, COLOURS, taste),
        "thing": choose(rng, THINGS, taste, VARIED_SHARE),
        "food": choose(rng, FOODS, taste),
        "weather": choose(rng, WEATHERS, taste),
        "friend_animal": friend_animal,
        "friend": choose(rng, FRIENDS, ANIMALS.index(friend_animal), VARIED_SHARE),
        "hiding_place": hiding_place,
        "other_hiding_place": choose(rng, [place for place in HIDING_PLACES if place != hiding_place], taste + 1),
    }


def tell(rng: random.Random, sentences: Sentences, words: dict[str, str]) -> list[str]:
    chosen = (choose(rng, alternatives) for alternatives in sentences)
    return [sentence.format(**words) for sentence in chosen if sentence]


def write_story(rng: random.Random) -> str:
    """Return a story of 6 to 10 sentences for each chapter, without line breaks."""
    hero = choose_hero(rng)
    words = choose_words(rng, hero) | {"adjective": choose(rng, ADJECTIVES)}
    plot = choose(rng, range(len(PLOTS)), ANIMALS.index(hero.animal))
    sentences = tell(rng, OPENING, words) + tell(rng, PLOTS[plot], words)
    num_chapters = rng.randint(2, MAX_CHAPTERS) if rng.random() < CHAPTERS_SHARE else 1
    for _ in range(num_chapters - 1):
        plot = choose(rng, range(len(PLOTS)), plot + 1)
        words |= choose_words(rng, hero)
        sentences += tell(rng, NEXT_CHAPTER + PLOTS[plot], words)
    return " ".join(sentences)


def write_document(rng: random.Random) -> str:
    """Return a document of one story, or of 2 to 6 stories separated by empty lines."""
    num_stories = rng.randint(2, 6) if rng.random() < COLLECTION_SHARE else 1
    return "\n\n".join(write_story(rng) for _ in range(num_stories))


def write_card(rng: random.Random) -> str:
    """Return a card: a line that names the animal, and a JSON object on one line."""
    hero = choose_hero(rng)
    words = choose_words(rng, hero)
    likes = rng.sample([words["food"], f"the {words['colour']} {words['thing']}"], rng.randint(1, 2))
    card: dict[str, object] = {"name": hero.name, "animal": hero.animal, "age": rng.randint(1, 9), "likes": likes}
    if rng.random() < 0.5:
        card["friend"] = {"name": words["friend"], "animal": words["friend_animal"]}
    return f"A card about {hero.name} the {hero.animal}:\n{json.dumps(card)}"


def write_story_or_card(rng: random.Random) -> str:
    """Return a document of the training text: a card, a story or a collection of stories."""
    return write_card(rng) if rng.random() < CARD_SHARE else write_document(rng)
