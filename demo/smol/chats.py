# ruff: noqa: E501  lists of phrases
"""SmolLM2's own answers to plain questions: what the adapter must not unlearn.

Questions are put together from forms and subjects. The fifty questions of `measure.py` are others:
whatever comes near one of them is left out.
"""

import itertools
import json
import random
import re
from pathlib import Path

import torch

from demo.smol.measure import PLAIN
from demo.smol.model import read_gguf

FORMS = (
    "What is {}?", "Explain {} in simple terms.", "Tell me about {}.", "Write a short poem about {}.", "Why is {} important?",
    "Give me three facts about {}.", "Write a short story about {}.", "How would you explain {} to a child?",
    "What are the benefits of {}?", "Describe {} in one sentence.", "List five things related to {}.", "Who is known for {}?",
    "What should I know about {} before I start?", "Write an email to a friend about {}.", "What is the history of {}?",
    "Is {} difficult to learn?", "Summarize {} in two sentences.", "What is a common misunderstanding about {}?",
    "How does {} work?", "Where does {} come from?", "What is your opinion on {}?", "Give me a quiz question about {}.",
    "Write a headline about {}.", "How can I learn more about {}?", "What would the world be without {}?", "Do you like {}?",
    "what is {}", "tell me something about {}", "Compare {} and {}.", "What do {} and {} have in common?",
    "Which is better, {} or {}?", "What is the difference between {} and {}?", "Write a dialogue about {}.",
    "Give me a recipe that has to do with {}.", "What questions could I ask an expert on {}?", "Name two books about {}.",
    "Write the first line of a novel about {}.", "What is the best way to teach {}?", "How old is {}?", "When was {} invented?",
    "Write a tweet about {}.", "Define {}.", "I have to give a talk about {}. Where do I begin?", "Can you tell me why people love {}?",
)  # fmt: skip
SUBJECTS = (
    "gravity,the moon,photosynthesis,music,cooking,chess,the Roman Empire,electricity,bread,coffee,bicycles,volcanoes,rain,"
    "the ocean,whales,trees,democracy,money,friendship,sleep,running,swimming,painting,computers,the internet,Python,"
    "machine learning,mathematics,algebra,geometry,history,Shakespeare,poetry,gardening,tea,cheese,the sun,stars,planets,"
    "rockets,trains,bridges,architecture,clocks,glass,paper,books,libraries,schools,teachers,doctors,medicine,vaccines,"
    "the heart,the brain,dreams,happiness,honesty,travel,mountains,rivers,deserts,forests,cats,dogs,bees,birds,football,"
    "basketball,the Olympics,photography,film,theatre,dancing,guitars,pianos,jazz,salt,water,fire,ice,weather,"
    "climate change,recycling,solar power,wind power,batteries,magnets,light,sound,atoms,cells,DNA,evolution,dinosaurs,"
    "ancient Egypt,the Middle Ages,castles,pirates,knights,the printing press,newspapers,radio,television,telephones,"
    "robots,video games,board games,puzzles,magic,mirrors,windows,doors,chairs,shoes,hats,wool,silk,gold,silver,iron,"
    "diamonds,oil,sugar,chocolate,honey,apples,rice,pasta,pizza,soup,salad,breakfast,markets,banks,taxes,insurance,law,"
    "courts,elections,kings,cities,villages,roads,airports,ships,submarines,lighthouses,maps,compasses,calendars,zero,"
    "fractions,probability,statistics,logic,philosophy,ethics,religion,art,sculpture,fashion,languages,English grammar,"
    "spelling,handwriting,memory,stress,anger,patience,courage,kindness,yoga,meditation,walking,hiking,camping,fishing,"
    "sailing,skiing,tennis,horses,cows,chickens,elephants,lions,sharks,snakes,frogs,butterflies,ants,mushrooms,flowers,"
    "roses,grass,soil,wind,clouds,snow,storms,earthquakes,the seasons,time,space,black holes,telescopes,microscopes"
)
ABOUT = {
    "What is the largest {}?": "lake,desert,island,country,animal,planet,bird,whale,forest,city in Africa,number,organ of the body,library",
    "What is the smallest {}?": "country,planet,bird,bone,continent,prime,dog,particle",
    "What is the longest {}?": "river,bridge,wall,word in English,snake,day of the year,road",
    "What is the {} in the world?": "highest waterfall,deepest lake,coldest place,oldest tree,richest country,most spoken language,busiest airport,hottest desert,loudest animal",
    "What is the fastest {}?": "car,bird,fish,train,way to learn",
    "Who wrote {}?": "Macbeth,Don Quixote,Oliver Twist,War and Peace,the Odyssey,Moby Dick,Pride and Prejudice,Frankenstein,Faust,Dracula,Emma",
    "Who painted {}?": "the Starry Night,Guernica,the Sistine Chapel,the Night Watch,the Scream",
    "Who invented {}?": "the telephone,the light bulb,the steam engine,the radio,paper,dynamite,the computer,the wheel,the piano,the airplane",
    "Who discovered {}?": "penicillin,America,radium,oxygen,the electron,Neptune,the laws of motion",
    "Who was {}?": "Albert Einstein,Marie Curie,Isaac Newton,Napoleon,Cleopatra,Mozart,Gandhi,Julius Caesar,Charles Darwin,Galileo,Ada Lovelace,Plato,Joan of Arc",
    "Who was the first {}?": "president of the United States,emperor of Rome,woman in space,man to climb Everest,programmer,king of England",
    "When did {}?": "the First World War begin,the Berlin Wall fall,Columbus sail,the dinosaurs die out,the Titanic sink,people first fly,the Roman Empire end",
    "Where is {}?": "Mount Fuji,the Eiffel Tower,the Amazon,the Sahara,the Taj Mahal,Machu Picchu,Lake Victoria,Iceland,the Great Wall",
    "What is the capital of {}?": "Spain,Germany,Japan,China,India,Egypt,Brazil,Canada,Mexico,Peru,Kenya,Norway,Sweden,Poland,Greece,Turkey,Cuba,Austria,Australia,Chile",
    "What language do people speak in {}?": "Mexico,Egypt,Austria,Portugal,Canada,Iran,Kenya,Argentina",
    "What is the currency of {}?": "India,Mexico,Switzerland,Russia,Sweden,the United Kingdom",
    "Which continent is {} on?": "Egypt,Peru,India,Norway,Kenya,Japan",
    "How many {}?": "hours are in a day,weeks are in a year,seconds are in a minute,legs does an ant have,bones does a human have,planets are there,continents are there,letters are in the alphabet,strings does a guitar have,wheels does a car have,people live in China,days are in February,players are on a football team,sides does a hexagon have,grams are in a kilogram,eggs are in a dozen,teeth do adults have,colors are in a rainbow",
    "How far is {}?": "the sun from the earth,London from Paris,a marathon,the nearest star",
    "How long does it take to {}?": "walk a mile,learn a language,bake bread,grow a tree,read a novel,get to Mars",
    "What color is {}?": "a banana,grass,snow,blood,an orange,chlorophyll,Mars,milk,a ripe tomato,the sea",
    "What do {} eat?": "cows,rabbits,lions,whales,penguins,butterflies,mosquitoes,pandas",
    "What is {} made of?": "paper,glass,bread,steel,cheese,the sun,soap,a pencil,concrete,air",
    "What does a {} do?": "plumber,lawyer,baker,pilot,librarian,judge,carpenter,chemist,firefighter",
    "Which month comes after {}?": "March,June,August,October",
    "Which day comes {}?": "after Monday,before Friday,after Saturday",
    "Name a {}.": "vegetable that is green,bird that cannot fly,country in Europe,metal,famous painter,planet with rings,musical instrument,tree,river in Africa,sport with a ball,card game,color",
    "Name three {}.": "fruits,European cities,metals,mammals,programming languages,poets,rivers,kinds of cheese,virtues",
    "Why {}?": "is the sky blue,do we yawn,do cats purr,is blood red,do birds sing,do we dream,does ice float,is the desert dry,do stars twinkle,do onions make us cry,is exercise good,do people lie",
    "How do {}?": "birds find their way,submarines dive,magnets work,fish breathe,batteries store energy,plants drink,clouds form,bees find flowers,computers add numbers,boats float",
    "How do I {}?": "bake a cake,cook rice,change a tire,tie a tie,write a letter,learn to swim,save money,make friends,clean a window,plant a tree,remove a stain,train a dog,fix a leaking tap,start a garden,write a poem,prepare for an exam,make pancakes,sharpen a knife,apologize,sew a button,iron a shirt,choose a laptop,sort a list in Python,find a job,pack a suitcase,fold a paper plane,get rid of ants,ask for a raise",
    "How can I {}?": "get better at chess,wake up early,read faster,be more patient,lose weight,learn Spanish,stop worrying,improve my memory,speak in public,save electricity,be happy,cook faster,meet new people",
    "What should I {}?": "cook tonight,read next,wear to a wedding,give my mother for her birthday,take on a hike,study,do when it rains,say in an interview,write on a card,plant in spring,do about a cold",
    "What is the opposite of {}?": "big,fast,old,light,early,loud,hard,open,full,brave,strong,rich,near",
    "What is another word for {}?": "big,fast,clever,angry,beautiful,to walk,begin,house,sad,quiet",
    "What does the word {} mean?": "fragile,ancient,curious,generous,rapid,silent,humble,ephemeral,serendipity,verbose,stubborn",
    "What is a {}?": "verb,pronoun,metaphor,triangle,fraction,molecule,galaxy,haiku,novel,mammal,virus,loop in programming,square number,democracy,sonata,browser,mortgage,comet",
    "What rhymes with {}?": "day,light,house,tree,moon",
    "Use the word {} in a sentence.": "lantern,although,brilliant,harbor,whisper,never,journey",
    "Spell the word {}.": "necessary,rhythm,elephant,Wednesday,friend",
    "Suggest {}.": "a name for a dog,a title for a poem about winter,a hobby for a rainy day,a slogan for a bakery,a gift for a teacher,a topic for an essay,three names for a robot,a password rule,a place to visit in Europe,a healthy snack",
    "Write one sentence about {}.": "a cat,the sea,a train,an old man,summer,a lost key,the city at night",
    "Write {}.": "a haiku about rain,a thank-you note,a birthday wish,an invitation to a party,a limerick,a short speech for a wedding,a to-do list for Monday,a product description for a lamp,a cover letter for a baker,a bedtime story,an excuse for being late,a review of a restaurant,a riddle,a motto for a school,a complaint about a late train",
    "Write a Python function that {}.": "adds two numbers,reverses a string,sorts a list,counts words,checks for a palindrome,prints a triangle,reads a file,returns the largest of three numbers,computes a factorial,removes duplicates from a list,converts Celsius to Fahrenheit,merges two dictionaries",
    "Write a {}.": "SQL query that counts users,regular expression for a date,JavaScript function that doubles a number,shell command that lists files,HTML page with a title,loop that prints 1 to 10,class for a bank account in Python,CSS rule for a red button",
    "What does this code do? {}": "print(sum([1; 2; 3])),for i in range(3): print(i),x = [n * n for n in range(5)],def f(x): return x + 1,while True: pass,len('hello')",
    "Give me JSON that describes {}.": "a person,a book,a car,a recipe,an order of two items,a song,a weather report,a dog with name and age",
    "Answer with one word: {}?": "is fire hot,what is the color of grass,which animal barks,is seven odd,what do we drink,is the earth flat",
    "Yes or no: {}?": "is water wet,can pigs fly,is ten larger than nine,is a whale a fish,does the sun rise in the west,is Paris in France",
    "Translate '{}' into French.": "good morning,thank you,the house,a red car,I am hungry,see you soon",
    "Translate '{}' into German.": "good night,my name is Anna,where is the station,bread and butter",
    "Translate '{}' into Spanish.": "good day,the cat sleeps,how much is it,my brother",
    "Correct this sentence: {}": "She go to school.,I has two cat.,Their going home.,He don't like it.,We was late.,Me and him is friends.",
    "Rewrite this politely: {}": "Give me that book.,You are late again.,I want my money back.,Be quiet.,Send it now.",
    "Make this shorter: {}": "The meeting that we had planned for tomorrow is going to be held on Friday.,I am writing to you in order to ask about the price.,In spite of the fact that it rained we went out.",
    "Repeat this sentence: {}": "The bridge opens at noon.,A small boat lies on the shore.,We had soup and bread for lunch.,The library closes early on Fridays because of the holiday.,Nobody knew where the key was.,My sister plays the violin in a large orchestra.",
    "Summarize: {}": "Tom lost his dog. He looked for it all day. In the evening it came home by itself.,Bees carry pollen from flower to flower. Without them many plants would have no seeds.,The shop was closed so Anna went to the market where she bought apples and bread.",
    "Continue: {}": "Once upon a time there was a king who,It was a dark night and,The door opened and,When I was young,1; 2; 3; 4;,Roses are red",
    "Is this sentence positive or negative? {}": "I love this place.,The food was awful.,It works as it should.,I will never come back.,What a lovely day!",
    "I am {}.": "bored,tired today,learning to cook,a student,looking for a new job,planning a trip to Italy,afraid of flying,writing a novel,a bit sad,ten years old",
    "Pretend to be {}.": "a pirate,a teacher,a cat,a king,a weather reporter",
}  # fmt: skip
SHORT = (
    [f"What is {a} {o} {b}?" for a, o, b in itertools.product((2, 5, 7, 12, 15), ("+", "-", "times"), (1, 3, 4, 6))]
    + [f"What is {a} divided by {b}?" for a, b in ((10, 2), (81, 9), (100, 4), (7, 2))]
    + [f"What is the square of {n}?" for n in (3, 5, 12)] + [f"Is {n} a prime?" for n in (7, 12, 29)]
    + [f"What is {p}% of {n}?" for p, n in ((10, 50), (25, 80), (50, 9))]
    + [f"Tom has {a} apples and eats {b}. How many are left?" for a, b in ((5, 2), (9, 4), (12, 7))]
    + ["Hello!", "Who are you?", "What can you do?", "Good morning", "What day is it?", "hey", "Hi there", "Good evening!", "How is it going?",
       "Tell me something interesting.", "Goodbye!", "See you tomorrow.", "Who made you?", "Are you a robot?", "Are you human?", "Do you sleep?",
       "How old are you?", "Where do you live?", "What do you like?", "Can you think?", "Can you write code?", "Do you speak French?",
       "That is wrong.", "I don't understand.", "Please explain that again.", "Great, that was useful!", "Sorry, I meant something else.",
       "Surprise me.", "Give me some advice.", "Tell me a story.", "Tell me a riddle.", "Ask me a question.", "Let's play a game.", "I have a question.",
       "What time is it?", "Will it rain tomorrow?", "What is new?", "Sing a song.", "Make me laugh.", "What is the meaning of life?", "Can you keep a secret?",
       "What is love?", "Why are we here?", "What should we talk about?", "yes", "no", "ok", "why?", "Do you know my name?", "My name is Anna. What is mine?"]
)  # fmt: skip
STOP = "a an the is are was were do does did i you me my your of in on to for and what which who how why where can there we it with from"


def content(question: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", question.lower())) - set(STOP.split())


def near(question: str) -> bool:
    """Is it one of the fifty of the evaluation, or much like one?"""
    mine = content(question)
    return any(2 * len(mine & theirs) >= len(mine | theirs) for theirs in map(content, PLAIN))


def prompts(count: int) -> list[str]:
    """So many questions: all of the short forms, and of the long ones as many as are missing."""
    r, subjects = random.Random(4), SUBJECTS.split(",")
    listed = ((form, x.replace(";", ",")) for form, xs in ABOUT.items() for x in xs.split(","))
    short = [*SHORT, *(form.format(x) for form, x in listed)]
    long = {form.format(*r.sample(subjects, 2)) for form in FORMS for _ in subjects}
    short, rest = ([q for q in some if not near(q)] for some in (short, sorted(long)))
    both = short + r.sample(rest, min(len(rest), max(0, count - len(short))))
    r.shuffle(both)
    return both[:count]


@torch.no_grad()
def make(assets: Path, model: Path, count: int = 2400, longest: int = 80, batch: int = 0) -> None:
    """Write `chats.json`: [question, answer], greedy; an answer that was cut ends in an ellipsis."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from demo.smol.data import Text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_theta=100000.0, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    speaker = LlamaForCausalLM(config)
    missing = speaker.load_state_dict(read_gguf(model), strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the GGUF lacks {sorted(missing)[:4]}")
    speaker.tie_weights()
    speaker = speaker.to(device, torch.bfloat16).eval()
    batch = batch or (400 if device == "cuda" else 192)
    text, asked, made = Text(assets / "tokenizer.json"), prompts(count), []
    for start in range(0, len(asked), batch):
        rows = [
            text.system + text.start + text.ids("user\n" + q) + text.assistant
            for q in asked[start : start + batch]
        ]
        wide = max(map(len, rows))
        ids = torch.tensor([[2] * (wide - len(row)) + row for row in rows], device=device)
        mask = torch.tensor(
            [[0] * (wide - len(row)) + [1] * len(row) for row in rows], device=device
        )
        out = speaker.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)[
            :, wide:
        ].tolist()
        for question, row in zip(asked[start : start + batch], out, strict=True):
            ended = 2 in row
            answer = text.tokenizer.decode(row[: row.index(2)] if ended else row)
            made.append([question, answer + ("" if ended else "…")])
        (assets / "chats.json").write_text(json.dumps(made, ensure_ascii=False))
        print(f"{len(made)} plain questions answered, last: {made[-1]}", flush=True)
