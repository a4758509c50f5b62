"""The prompts that answers are compared on when the user brings none; written for this project, free for any use.

Varied on purpose: facts, reasoning, sums, code, lists, translation, rewriting, other languages, and passages that must
be read before the question can be answered, because errors of a low-precision KV cache grow with what is read.
"""

from __future__ import annotations

PASSAGES = (
    "The lighthouse on Skerry Point was built in 1871 from granite that had been shipped forty miles along the "
    "coast. Its first keeper, a former ship's carpenter called Anders Holm, lived there with his wife and three "
    "daughters for nineteen years. He kept a log in which he noted the weather twice a day, every ship that passed, "
    "and the price of oil. In the winter of 1883 a storm broke two panes of the lantern, and Holm kept the lamp "
    "burning for eleven hours by holding a wet blanket against the wind. When the light was electrified in 1932, "
    "the tower no longer needed a keeper, and the house became a school for the children of the fishing villages. "
    "Today it is a small museum; the log lies open in the first room, at the page of the storm.",
    "Bread needs four things: flour, water, salt and something that makes it rise. With yeast the dough is ready in "
    "two hours; with sourdough it takes a day, but the crumb stays moist for longer and the crust tastes of more. "
    "The dough should rest before it is shaped, because rest lets the gluten form without work. A hot oven matters "
    "more than any recipe: the loaf must spring up before the crust has set, and steam in the first ten minutes "
    "keeps the crust soft enough to allow it. Bakers tap the bottom of the loaf to hear whether it is done; a "
    "hollow sound means that the water inside has mostly gone. A loaf that is cut while hot seems damp, since the "
    "starch has not yet set.",
    "A warehouse ships parcels to three regions. The north receives 120 parcels a day, the south 80 and the west "
    "50. Each van carries 25 parcels and makes two trips a day. Drivers are paid 140 a day, whatever they carry, "
    "and fuel costs 30 a trip. Last month the company added a sorting machine, which cut the time to load a van "
    "from forty minutes to fifteen, so that a third trip became possible for vans that serve the west, because that "
    "region is nearest. The north is farthest away and its vans are often late. The manager wants to know whether "
    "one van could be sold without delaying any parcel, and what that would save.",
    "Meeting notes, Tuesday. Present: Mara, Tobias, Yusuf, Lin. The release is planned for the 14th. Lin reports "
    "that the import of old accounts still fails for names with an apostrophe; she has a fix and needs a reviewer. "
    "Tobias will review it by Thursday. Yusuf asks whether the help pages are translated; Mara says that French and "
    "Spanish are done and that German waits for the new screenshots. The load test of Monday reached 900 requests a "
    "second before errors began; the goal is 1,200. Tobias suspects the database pool and will raise it from 20 to "
    "50 and test again on Wednesday. If the goal is not met by Friday noon, the release moves to the 21st. Next "
    "meeting: Friday, ten o'clock.",
    "Dear team, I rented one of your bicycles at the station on Saturday morning and brought it back on Sunday "
    "evening. The app charged me for three days instead of two. I also want to mention that the rear brake was "
    "loose when I took the bicycle over; I tightened it myself with a borrowed key, because there was nobody at the "
    "counter. Apart from that the tour along the river was wonderful, and the child seat that your colleague had "
    "lent us was clean and easy to mount. Please correct the bill. I would be glad to rent from you again in May, "
    "when we come for a week with two more children, if you can tell me whether smaller bicycles are to be had.",
    "Tides are the rise and fall of the sea that the moon, and to a lesser degree the sun, brings about. The moon "
    "pulls more strongly on the water that faces it than on the earth as a whole, and more weakly on the water on "
    "the far side, so that two bulges form, and a place passes through both of them in a little more than a day. "
    "When sun and moon stand in line, at new moon and at full moon, their effects add up and the tides are high; "
    "these are called spring tides. At half moon they partly cancel, which gives neap tides. The shape of a coast "
    "matters as well: in a funnel-shaped bay the water is squeezed together and may rise by more than ten metres.",
)

QUESTIONS = (
    "What is the capital of Portugal, and on which river does it lie?",
    "Explain in three sentences why the sky is blue.",
    "Name five animals that sleep through the winter.",
    "Who wrote Don Quixote, and roughly when?",
    "How does a refrigerator move heat from the inside to the outside?",
    "What is the difference between weather and climate?",
    "Why do boats made of steel float?",
    "List the planets of the solar system in their order from the sun.",
    "A train leaves at 14:35 and arrives at 17:10. How long does the journey take?",
    "What is 17 times 23? Show the steps.",
    "If three pens cost 4.50, what do seven pens cost?",
    "A rectangle is twice as long as it is wide and its perimeter is 36 cm. How long are its sides?",
    "Sort these numbers from small to large: 42, 7, 19, 3, 88, 54, 21.",
    "All roses are flowers. Some flowers fade quickly. Does it follow that some roses fade quickly? Explain.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a word reads the same backwards.",
    "What does this SQL query return? SELECT city, COUNT(*) FROM customers GROUP BY city ORDER BY 2 DESC LIMIT 3;",
    "Write a regular expression that matches dates such as 2024-03-17, and explain its parts.",
    "Explain what a hash table is to somebody who has never programmed.",
    "Find the mistake in this code: for i in range(10) print(i)",
    "Write a shell command that counts the lines of all .txt files in a folder.",
    "Turn this into JSON: name Anna, age 34, languages Italian and Greek.",
    "Translate into French: Where is the nearest pharmacy, please?",
    "Translate into German: The meeting has been moved to Thursday afternoon.",
    "Translate into Spanish: I have lost my umbrella on the bus.",
    "¿Cuáles son los ingredientes principales de una tortilla española?",
    "Quelle est la différence entre un lac et un étang ?",
    "Erkläre kurz, wie ein Kompass funktioniert.",
    "请用三句话介绍一下长城。",
    "水が沸騰する温度は、山の上ではなぜ低くなりますか。",
    "Write a short poem about a river in autumn.",
    "Begin a story with the sentence: The key did not fit any door in the house.",
    "Write a polite message that declines an invitation to a dinner.",
    "Give me a title and three bullet points for a talk about saving water at home.",
    "Rewrite this more formally: Hey, can you send me that file again? I can't find it anywhere.",
    "Describe the taste of a lemon to somebody who has never eaten one.",
    "What should I pack for a weekend of hiking in the mountains in October?",
    "Give step by step instructions for changing a flat bicycle tyre.",
    "Suggest a simple dinner from rice, eggs, tomatoes and spinach.",
    "What are two arguments for and two against working from home?",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "The three most important inventions of the nineteenth century were",
)

DEFAULT_PROMPTS = (
    *QUESTIONS,
    f"{PASSAGES[0]}\n\nHow did the keeper keep the lamp burning in the storm, and what is the house today?",
    f"{PASSAGES[1]}\n\nSummarise this text in two sentences.",
    f"{PASSAGES[2]}\n\nHow many vans does the company need each day? Explain your reasoning.",
    f"{PASSAGES[3]}\n\nList what each person has to do, and by when.",
    f"{PASSAGES[4]}\n\nWrite a short and friendly answer to this letter.",
    f"{PASSAGES[5]}\n\nWhat are spring tides and neap tides?",
)
"""48 prompts."""
