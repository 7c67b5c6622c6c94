"""What a teacher is asked to write: millions of combinations of who, where, what and how it ends.

Eldan and Li 2023 (TinyStories, arXiv:2305.07759) drew three words for each story; here a whole scene is
drawn, and the story's first sentence with it, because a small teacher likes to begin alike.
"""

import json
import random
import re
import sys


def _each(text: str) -> list[str]:
    return [" ".join(one.split()) for one in text.split(",")]


def _each_line(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


NAMES = _each("""
    Anna, Ben, Clara, Dan, Ella, Finn, Grace, Hugo, Ida, Jack, Kate, Leo, Mia, Noah, Olive, Pip, Rosa,
    Sam, Tilly, Uma, Vera, Will, Zoe, Amir, Bella, Carlos, Daisy, Eli, Flora, George, Hana, Ivan, Julia,
    Kofi, Lily, Max, Nina, Oscar, Poppy, Ravi, Sara, Tom, Wendy, Yuki, Alba, Bruno, Coco, Dora, Emil,
    Fay, Gus, Holly, Jonas, Kira, Luna, Milo, Nell, Otto, Penny, Quinn, Ruby, Sid, Theo, Viola
""")
CHARACTERS = _each("""
    girl, boy, fox, bear, mouse, rabbit, cat, dog, owl, duck, frog, turtle, squirrel, hedgehog,
    elephant, lion, robot, dragon, wizard, princess, farmer, baker, fisherman, gardener, pony, kitten,
    puppy, penguin, snail, bee, crow, goat, sheep, wolf, giant, mermaid, fairy, grandmother, painter,
    sailor, monkey, whale, butterfly, lamb, pig, hen, donkey, beaver, badger, deer
""")
TRAITS = _each("""
    little, brave, shy, kind, curious, clever, sleepy, hungry, lonely, happy, grumpy, careful, funny,
    proud, gentle, noisy, quiet, lazy, busy, stubborn, forgetful, cheerful, patient, honest, greedy,
    playful, nervous, polite, silly, wise
""")
PLACES = _each("""
    a green forest, a small village, a big city, a farm, a quiet beach, a snowy mountain, an old castle,
    a garden full of flowers, a cave, a busy market, a school, a ship on the sea, an island, a deep
    lake, a house on a hill, a train, a library, a bakery, a river with a wooden bridge, a desert, a
    playground, a tall tower, a kitchen, a meadow, a barn, a tree house, a park, a toy shop, a
    lighthouse, a pond, a windmill, an apple orchard, a train station, a hospital, a museum, a circus, a
    zoo, an attic
""")
THINGS = _each("""
    a red ball, a golden key, an old map, a warm scarf, a blue kite, a shiny stone, a broken clock, a
    music box, a small boat, a big cake, a magic lamp, a pair of boots, a yellow umbrella, a letter, a
    drum, a lost hat, a seed, a candle, a basket of apples, a silver bell, a book with no words, a
    bicycle, a jar of honey, a toy train, a mirror, a rope, a coin, a feather, a balloon, a teddy bear,
    a wooden box, a pot of soup, a lantern, a necklace, a puzzle, a paper plane, a snowman, a bag of
    nuts, a bucket, a blanket, a ladder, a flute, a pumpkin, a star, a nest, a bone, a cookie, a button,
    a ring, a painting
""")
EVENTS = _each("""
    gets lost, makes a new friend, finds something strange, helps someone who is sad, breaks something
    by mistake, learns to swim, is caught in a storm, tells a lie, wins a race, loses something dear,
    has a bad dream, plans a surprise, hears a strange noise, shares the last piece of food, climbs too
    high, meets a stranger, wants to fly, forgets a promise, plays a trick, builds something new, is
    afraid of the dark, saves a small animal, misses a friend, has a birthday, learns to wait, says
    sorry, follows a trail, solves a riddle, cannot sleep, tries to cook, moves to a new home, learns to
    sing, finds a hidden door, waits for the rain
""")
MANNERS = _each("""
    short, short, short, very short, very short, short and funny, short and happy, short and quiet,
    short and sad
""")
OPENINGS = [
    *_each_line("""
    Once upon a time, there was a {trait} {who} named {name}.
    Once upon a time, a {trait} {who} named {name} lived near {place}.
    One day, {name} the {who} went to {place}.
    There once was a {who} called {name}, who was very {trait}.
    {name} was a {trait} {who}.
    In {place}, there lived a {trait} {who} named {name}.
    One morning, {name} the {who} woke up early.
    {name} the {who} had {thing}.
    Long ago, in {place}, a {who} named {name} found {thing}.
    It was a sunny day.
    One night, {name} the {who} could not sleep.
    {name} and {friend} were best friends.
    Every day, {name} the {who} walked to {place}.
    {name} loved {thing} more than anything.
    Once there was {thing}.
    "Look!" said {name}. "What is that?"
    Far away, near {place}, lived {name}, a {trait} {who}.
    On a cold day, {name} the {who} found {thing}.
    """),
    "",
    "",  # the teacher's own
]
ASKS = [
    "Write a {manner} story for children about a {trait} {who} named {name} who {event}.",
    "Write a {manner} story for children about {name}, a {trait} {who}, and {thing}.",
    "Write a {manner} bedtime story about a {who} named {name} who {event} in {place}.",
    "Write a {manner} story for children about {name} the {who} and {friend} the {other}.",
    "Tell me a {manner} story about a {trait} {who} called {name}, who lives near {place}.",
    "Write a {manner} story in simple words about {name} the {trait} {who}, who {event}.",
]
# SmolLM2's own chat, with the system message that it was taught with.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
)


def draw(rng: random.Random) -> tuple[str, str]:
    """A prompt, and the first sentence of the answer in it ("": the teacher's own)."""
    name, friend = rng.sample(NAMES, 2)
    who, other = rng.sample(CHARACTERS, 2)
    lists = {"trait": TRAITS, "place": PLACES, "thing": THINGS, "event": EVENTS, "manner": MANNERS}
    scene = {word: rng.choice(some) for word, some in lists.items()}
    scene |= {"name": name, "friend": friend, "who": who, "other": other}
    ask, opening = (_with_articles(rng.choice(texts).format(**scene)) for texts in (ASKS, OPENINGS))
    opening = opening[:1].upper() + opening[1:]
    return CHAT.format(ask, opening), opening


def _with_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


if __name__ == "__main__":  # toy stories, to try the rest of the recipe with
    rng = random.Random(0)
    for number in range(int(sys.argv[1])):
        sentences = [draw(rng)[1] or "The end." for _ in range(20)]
        print(json.dumps(" ".join([*sentences, f"That was story {number}."])))
