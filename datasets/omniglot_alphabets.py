"""The contents of Omniglot: the characters of each alphabet (Lake et al., Science 2015).

Local archives are often re-zipped, so a checksum of the file says nothing; this table is what they
are checked against.
"""

from __future__ import annotations

DRAWINGS = 20

# images_background: 30 alphabets, 964 characters.
BACKGROUND: dict[str, int] = {
    "Alphabet_of_the_Magi": 20,
    "Anglo-Saxon_Futhorc": 29,
    "Arcadian": 26,
    "Armenian": 41,
    "Asomtavruli_(Georgian)": 40,
    "Balinese": 24,
    "Bengali": 46,
    "Blackfoot_(Canadian_Aboriginal_Syllabics)": 14,
    "Braille": 26,
    "Burmese_(Myanmar)": 34,
    "Cyrillic": 33,
    "Early_Aramaic": 22,
    "Futurama": 26,
    "Grantha": 43,
    "Greek": 24,
    "Gujarati": 48,
    "Hebrew": 22,
    "Inuktitut_(Canadian_Aboriginal_Syllabics)": 16,
    "Japanese_(hiragana)": 52,
    "Japanese_(katakana)": 47,
    "Korean": 40,
    "Latin": 26,
    "Malay_(Jawi_-_Arabic)": 40,
    "Mkhedruli_(Georgian)": 41,
    "N_Ko": 33,
    "Ojibwe_(Canadian_Aboriginal_Syllabics)": 14,
    "Sanskrit": 42,
    "Syriac_(Estrangelo)": 23,
    "Tagalog": 17,
    "Tifinagh": 55,
}

# images_evaluation: 20 alphabets, 659 characters.
EVALUATION: dict[str, int] = {
    "Angelic": 20,
    "Atemayar_Qelisayer": 26,
    "Atlantean": 26,
    "Aurek-Besh": 26,
    "Avesta": 26,
    "Ge_ez": 26,
    "Glagolitic": 45,
    "Gurmukhi": 45,
    "Kannada": 41,
    "Keble": 26,
    "Malayalam": 47,
    "Manipuri": 40,
    "Mongolian": 30,
    "Old_Church_Slavonic_(Cyrillic)": 45,
    "Oriya": 46,
    "Sylheti": 28,
    "Syriac_(Serto)": 23,
    "Tengwar": 25,
    "Tibetan": 42,
    "ULOG": 26,
}

# Part of the data set, which is also the name of its archive and of its folder, to its alphabets.
PARTS: dict[str, dict[str, int]] = {
    "images_background": BACKGROUND,
    "images_evaluation": EVALUATION,
}


def class_names() -> list[str]:
    """The 1,623 classes as ``alphabet/characterNN``, in the row order of the image array.

    Background alphabets sorted by name, then evaluation alphabets sorted by name; characters in
    order in each.
    """
    return [
        f"{alphabet}/character{number:02d}"
        for alphabets in PARTS.values()
        for alphabet in sorted(alphabets)
        for number in range(1, alphabets[alphabet] + 1)
    ]
