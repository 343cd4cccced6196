# ruff: noqa: E501  lists of phrases
"""Gather what the painter needs: fonts that may be passed on, a sheet of emoji, a list of words.

    python -m demo.smol.assets FOLDER

The fonts come from Debian's packages `fonts-dejavu`, `fonts-liberation`, `fonts-freefont-ttf`,
`fonts-lato`, `fonts-open-sans`, `fonts-roboto-unhinted` and `fonts-noto-core`; the emoji from
`fonts-noto-color-emoji` (SIL Open Font License). The words are whole tokens of the language model.
"""

import json
import random
import shutil
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer

FONTS = [
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSansMono",
    "DejaVuSansCondensed",
    "LiberationSans-Regular",
    "LiberationSans-Bold",
    "LiberationSerif-Regular",
    "LiberationSerif-Bold",
    "LiberationMono-Regular",
    "LiberationSansNarrow-Regular",
    "FreeSans",
    "FreeSerif",
    "FreeMonoBold",
    "Lato-Regular",
    "Lato-Bold",
    "Lato-Black",
    "OpenSans-Regular",
    "OpenSans-Bold",
    "Roboto-Regular",
    "Roboto-Bold",
    "Roboto-Light",
    "NotoSans-Regular",
    "NotoSerif-Regular",
]
EMOJI = (
    "🍎 apple,🍌 banana,🍇 grapes,🍓 strawberry,🍉 watermelon,🍋 lemon,🍒 cherries,🍍 pineapple,🥕 carrot,🌽 corn,"
    "🍅 tomato,🍆 eggplant,🥑 avocado,🍄 mushroom,🥦 broccoli,🍞 bread,🧀 cheese,🍕 pizza,🍔 hamburger,🌭 hot dog,"
    "🍟 fries,🍩 doughnut,🍪 cookie,🎂 cake,🍦 ice cream,🍫 chocolate,🍿 popcorn,🥚 egg,☕ coffee,🍺 beer,🍷 wine,"
    "🐶 dog,🐱 cat,🐭 mouse,🐰 rabbit,🦊 fox,🐻 bear,🐼 panda,🐨 koala,🐯 tiger,🦁 lion,🐮 cow,🐷 pig,🐸 frog,"
    "🐵 monkey,🐔 chicken,🐧 penguin,🦉 owl,🦆 duck,🐴 horse,🦄 unicorn,🐝 bee,🦋 butterfly,🐌 snail,🐞 ladybug,"
    "🐢 turtle,🐍 snake,🐙 octopus,🦀 crab,🐟 fish,🐬 dolphin,🐳 whale,🦈 shark,🐘 elephant,🦒 giraffe,🐫 camel,"
    "🐑 sheep,🌵 cactus,🌲 tree,🌴 palm tree,🍀 clover,🌹 rose,🌻 sunflower,🌷 tulip,🌞 sun,🌙 moon,🌈 rainbow,"
    "⚡ lightning,🔥 fire,💧 drop,❄ snowflake,⛄ snowman,☔ umbrella,⚽ soccer ball,🏀 basketball,🏈 football,"
    "⚾ baseball,🎾 tennis ball,🏆 trophy,🎯 target,🎲 die,🎸 guitar,🎺 trumpet,🎻 violin,🥁 drum,🎨 palette,"
    "🎁 gift,🎈 balloon,🎃 pumpkin,🎄 Christmas tree,🚗 car,🚕 taxi,🚌 bus,🚑 ambulance,🚒 fire truck,🚚 truck,"
    "🚜 tractor,🚲 bicycle,🛵 scooter,🚂 train,✈ airplane,🚀 rocket,🚁 helicopter,⛵ sailboat,🚢 ship,⚓ anchor,"
    "🏠 house,🏰 castle,⛺ tent,🔑 key,🔒 lock,💡 light bulb,🔦 flashlight,📱 phone,💻 laptop,⌚ watch,📷 camera,"
    "📺 television,🎧 headphones,⏰ alarm clock,📚 books,✏ pencil,✂ scissors,📎 paperclip,🔨 hammer,🔧 wrench,"
    "🔔 bell,👑 crown,👓 glasses,🎩 top hat,👕 shirt,👖 jeans,👗 dress,👟 shoe,👜 handbag,🎒 backpack,💰 money bag,"
    "💎 gem,🧲 magnet,🔭 telescope,🔬 microscope,💊 pill,🚪 door,🧹 broom,🧸 teddy bear,✉ envelope,😀 smiling face,"
    "😢 crying face,😡 angry face,😎 face with sunglasses,😴 sleeping face,👍 thumbs up,👻 ghost,💀 skull,🤖 robot,"
    "👽 alien,🗺 map,🌍 globe,🪑 chair,🏁 flag,⚙ gear,🔍 magnifying glass,🎤 microphone,🚦 traffic light,🛒 cart"
)
SIDE = 96


def emoji(into: Path, font_file: Path) -> int:
    pairs = [entry.split(" ", 1) for entry in EMOJI.split(",")]
    font = ImageFont.truetype(str(font_file), 109)
    tiles: list[Image.Image] = []
    for sign, name in pairs:
        tile = Image.new("RGBA", (136, 128), (0, 0, 0, 0))
        ImageDraw.Draw(tile).text((0, 0), sign, font=font, embedded_color=True)
        box = tile.getbbox()
        if box is None:
            raise SystemExit(f"{font_file} has no picture for {name}")
        drawn, side = tile.crop(box), max(box[2] - box[0], box[3] - box[1])
        square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
        square.paste(drawn, ((side - drawn.width) // 2, (side - drawn.height) // 2))
        tiles.append(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    across = 16
    sheet = Image.new("RGBA", (across * SIDE, -(-len(tiles) // across) * SIDE), (0, 0, 0, 0))
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % across * SIDE, i // across * SIDE))
    sheet.save(into / "emoji.png", optimize=True)
    names = [name for _, name in pairs]
    (into / "emoji.json").write_text(json.dumps({"side": SIDE, "names": names}))
    return len(names)


def words(into: Path, tokenizer_file: Path) -> int:
    """English words of 3 to 10 letters; every tenth is kept for the test alone."""
    vocabulary = Tokenizer.from_file(str(tokenizer_file)).get_vocab()
    whole = sorted((i, t[1:]) for t, i in vocabulary.items() if t.startswith("Ġ"))
    found = [
        t for _, t in whole if t.isascii() and t.isalpha() and t.islower() and 3 <= len(t) <= 10
    ]
    found = found[:9000]
    random.Random(0).shuffle(found)
    split = {"test": sorted(found[::10]), "train": sorted(set(found) - set(found[::10]))}
    (into / "words.json").write_text(json.dumps(split))
    return len(found)


def main(folder: str, tokenizer_file: str) -> None:
    into, system = Path(folder), Path("/usr/share/fonts/truetype")
    (into / "fonts").mkdir(parents=True, exist_ok=True)
    for name in FONTS:
        shutil.copy(next(system.rglob(f"{name}.ttf")), into / "fonts" / f"{name}.ttf")
    drawn = emoji(into, next(system.rglob("NotoColorEmoji.ttf")))
    print(f"{len(FONTS)} fonts, {drawn} emoji, {words(into, Path(tokenizer_file))} words in {into}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
