"""A verifier gives 1.0 to the right answer as people and models write it, and 0.0 to everything else."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import verify


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        (" 9\n", "9", 1),
        ("9", " 9 ", 1),
        ("9.", "9", 0),
        ("19", "9", 0),
        ("", "9", 0),
        ("A b", "a b", 0),
        ("a  b", "a b", 0),
    ],
)
def test_exact_ignores_white_space_around_and_nothing_else(completion, answer, reward):
    assert verify.exact(completion, {"answer": answer}) == reward


NUMBER = [
    ("so it is 7.", "7", 1),
    ("7, or is it 8?", "7", 0),  # the last number counts
    ("7, or is it 8?", "8", 1),
    ("72", "She sold 48+24 = 72 clips.\n#### 72", 1),
    ("It takes $1,234.", "Then ... = 1234\n#### 1,234", 1),
    ("1234567", "1,234,567", 1),
    ("1,23", "123", 0),  # a list: its last number is 23
    ("1,23", "23", 1),
    ("1,2", "12", 0),
    ("1,2,345", "2345", 0),
    ("1,2,345", "345", 1),
    ("12345,678", "12345678", 0),
    ("1,2345", "12345", 0),
    ("-3", "3", 0),
    ("3", "-3", 0),
    ("−3", "-3", 1),  # U+2212
    ("x = -3", "-3", 1),
    ("x=-3", "-3", 1),
    ("5 = −3", "-3", 1),
    ("pages 2-3", "3", 1),
    ("pages 2−3", "-3", 0),
    ("step-3", "3", 1),
    ("step-3", "-3", 0),
    ("(2)-3", "-3", 0),
    ("(-3)", "-3", 1),
    ("10 - 3", "-3", 0),
    ("-$5", "-5", 1),
    ("$-5", "-5", 1),
    ("$5.00", "5", 1),
    (".5", "0.5", 1),
    ("-.5", "-1/2", 1),
    ("3.", "3", 1),
    ("3.0", "3", 1),
    ("3.01", "3", 0),
    ("0.30000000000000001", "0.3", 0),  # equal as floats
    ("9007199254740993", "9007199254740992", 0),  # equal as floats
    ("50%", "50", 1),
    ("50%", "0.5", 0),
    ("3/4", "0.75", 1),
    ("6/8", "3/4", 1),
    ("3/4", "4", 0),
    ("1 3/4", "1.75", 1),
    ("1 3/4", "3/4", 0),
    ("-3/4", "3/4", 0),
    ("5/0", "5", 0),
    ("1e3", "1000", 1),
    ("1.5E-3", "0.0015", 1),
    ("1e3", "3", 0),
    ("1e999999999", "1e999999999", 0),  # nobody means it, and to compute it takes all memory
    ("1e-999999999", "0", 0),
    ("9" * 5000, "9", 0),  # more digits than Python reads
    ("9" * 5000, "9" * 5000, 0),
    ("7 cm^2", "7", 1),
    ("7 m2", "7", 1),
    ("x2 is 7, so is x3", "7", 1),
    ("答案是-7。", "-7", 1),
    ("no idea", "7", 0),
    ("", "7", 0),
    ("7", "none", 0),
    ("-", "7", 0),
]


@pytest.mark.parametrize("completion, answer, reward", NUMBER)
def test_number_compares_the_last_numbers_exactly(completion, answer, reward):
    assert verify.number(completion, {"answer": answer}) == reward


CHOICE = [
    ("C", "C", 1),
    ("c", "C", 1),
    (" (C)\n", "C", 1),
    ("C.", "C", 1),
    ("**C**", "(C)", 1),
    ("C) Paris", "C", 1),
    ("C. Paris", "B", 0),
    (r"So \boxed{C}", "C", 1),
    (r"$\boxed{\text{(C)}}$", "C", 1),
    (r"\boxed{\textbf{(C)}\ 12}", "C", 1),
    (r"\boxed{B} ... \boxed{C}", "C", 1),  # the last
    (r"\boxed{B} ... \boxed{C}", "B", 0),
    (r"Answer: B, that is \boxed{C}", "B", 0),  # boxed comes first
    (r"Answer: C. \boxed{}", "C", 0),
    (r"\boxed{c}", "C", 0),  # a variable as likely as a choice
    ("Answer: C", "C", 1),
    ("**Answer:** C", "C", 1),
    ("### Answer\nC", "C", 1),
    ("The answer is (C).", "C", 1),
    ("The answer is **C**", "C.", 1),
    ("The correct answer is option C because it fits.", "C", 1),
    ("The answer is A because it fits.", "A", 1),
    ("The answer is B. No, the answer is C.", "C", 1),
    ("The answer is B. No, the answer is C.", "B", 0),
    ("The answer is C, as (A) and (B) are wrong.", "C", 1),
    ("The answer is C, as (A) and (B) are wrong.", "B", 0),
    ("Answer choice (A) is wrong, so it must be (D).", "D", 1),
    ("It cannot be (A), so (B).", "B", 1),
    ("It cannot be (A), so (B).", "A", 0),
    ("A dog is an animal.", "A", 0),
    ("I think so", "I", 0),
    ("The answer is A dog.", "A", 0),
    ("The answer is I think a dog.", "I", 0),
    ("The answer is unclear.", "U", 0),
    ("The answer is Cat", "C", 0),
    ("a, b and c", "C", 0),
    ("A B C D", "C", 0),
    ("", "C", 0),
]


@pytest.mark.parametrize("completion, answer, reward", CHOICE)
def test_choice_is_the_stated_letter_and_no_article(completion, answer, reward):
    assert verify.choice(completion, {"answer": answer}) == reward


MATH = [
    # the last \boxed{} counts, braces balanced, whatever else is said
    (r"First \boxed{3}, no: \boxed{4}", "4", 1),
    (r"First \boxed{4}, no: \boxed{3}", "4", 0),
    (r"\boxed{1} and \boxed{2} and \boxed{1}", "1", 1),
    (r"\boxed{4}\boxed{5}", "4", 0),
    (r"The answer is 4, that is \boxed{5}", "4", 0),
    (r"\boxed{5} is wrong, so the answer is 4", "5", 1),
    (r"Thus \boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", 1),
    (r"\boxed{\boxed{7}}", "7", 1),
    (r"$\boxed{x = 5}$", "5", 1),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{\text{5}}", "5", 1),
    (r"\boxed{\mathbf{5}}", "5", 1),
    # no answer, or none that is finished
    ("", "5", 0),
    (r"\boxed{}", "5", 0),
    (r"5 \boxed{}", "5", 0),
    (r"\boxed{ }", "0", 0),
    (r"\boxed{5", "5", 0),
    (r"The sum is \boxed{5", "5", 0),
    ("5. The answer is", "5", 0),
    ("   \n", "0", 0),
    (r"\boxed{?}", "5", 0),
    ("", "", 0),
    (r"\boxed{\text{}}", "0", 0),
    # no box: what follows the last marker, else the last number or formula
    ("First 7, then 12", "12", 1),
    ("First 7, then 12", "7", 0),
    ("So she has 3 + 4 = 7 apples.", "7", 1),
    ("So she has 3 + 4 = 7 apples.", "4", 0),
    ("He buys 5 for $3 each.\n#### 15", "15", 1),
    ("#### 15", "3 * 5 = 15\n#### 15", 1),
    ("#### 1,500", "1500", 1),
    ("The answer is 5 because 3 + 2 works.", "5", 1),
    (r"The answer is $\frac{3}{4}$.", "0.75", 1),
    ("**Answer:** 42", "42", 1),
    ("Answer:\n\n42", "42", 1),
    ("The final answer is: $-3$. I hope it is correct.", "-3", 1),
    ("The answer is 6. But wait, the answer is 7.", "7", 1),
    ("The answer is 6. But wait, the answer is 7.", "6", 0),
    ("The answer is 5, not 7.", "5", 1),
    ("We get 12 from 3 and 4.", "12", 0),
    # fractions and decimals
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1),
    (r"\boxed{\tfrac12}", "1/2", 1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    (r"\boxed{2/4}", "1/2", 1),
    (r"\boxed{-\frac{3}{4}}", r"\frac{-3}{4}", 1),
    (r"\boxed{\frac{3}{-4}}", "-0.75", 1),
    (r"\boxed{\frac{2}{3}}", r"\frac{3}{2}", 0),
    (r"\boxed{2\frac{1}{2}}", "2.5", 1),
    (r"\boxed{2 1/2}", "5/2", 1),
    (r"\boxed{2 1/2}", "3/2", 0),
    (r"\boxed{½}", "0.5", 1),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{0.50}", "0.5", 1),
    (r"\boxed{5.0}", "5", 1),
    (r"\boxed{5.}", "5", 1),
    (r"\boxed{0.333}", r"\frac{1}{3}", 0),
    (r"\boxed{0.3333333333}", "1/3", 1),
    (r"\boxed{2 1/2}", "21/2", 0),
    (r"\boxed{0.3333333333}", r"\frac{1}{3}", 1),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{22/7}", r"\pi", 0),
    (r"\boxed{0.0000001}", "0.0000002", 0),
    (r"so it is \frac{3}{4}", "0.75", 1),
    (r"\boxed{0.51}", "0.5", 0),
    # thousands separators
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{1\,234}", "1234", 1),
    (r"\boxed{1 234}", "1234", 1),
    (r"\boxed{1 234}", "1,234", 1),
    (r"\boxed{1 2}", "12", 0),
    (r"\boxed{1234567}", "1,234,567", 1),
    (r"\boxed{1,234}", "234", 0),
    (r"\boxed{1,234}", "235", 0),
    (r"\boxed{1243}", "1,234", 0),
    (r"\boxed{\$1,000}", "1000", 1),
    (r"\boxed{1\,234}", "235", 0),
    # signs
    (r"\boxed{-5}", "5", 0),
    (r"\boxed{5}", "-5", 0),
    (r"\boxed{−5}", "-5", 1),
    (r"\boxed{- 5}", "-5", 1),
    (r"\boxed{+5}", "5", 1),
    ("x = −7", "-7", 1),
    ("so 10 - 3", "-3", 0),
    (r"\boxed{-x}", "x", 0),
    (r"\boxed{x-y}", "y-x", 0),
    (r"\boxed{-$5}", "-5", 1),
    # scientific notation
    (r"\boxed{1e3}", "1000", 1),
    (r"\boxed{1000}", "1e3", 1),
    (r"\boxed{1}", "1e3", 0),
    (r"\boxed{3\times10^5}", "300000", 1),
    (r"\boxed{3 × 10^{5}}", "300000", 1),
    (r"\boxed{3\cdot 10^4}", "300000", 0),
    (r"\boxed{1.5e-3}", "0.0015", 1),
    (r"\boxed{1e999999999}", "5", 0),
    (r"\boxed{3.00 \times 10^{8}}", "3e8", 1),
    # percent: 50% is 50 and 0.5, as datasets have it both ways
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{12.5%}", "12.5", 1),
    (r"\boxed{12.5\%}", "0.125", 1),
    (r"\boxed{50\%}", "5", 0),
    (r"\boxed{20 percent}", "20%", 1),
    ("It is 40%.", "40", 1),
    # units are ignored
    (r"\boxed{5 cm}", "5", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{5\,\text{cm}}", "5", 1),
    (r"\boxed{5}", r"5\text{ cm}^2", 1),
    (r"\boxed{5 \text{ m}^2}", "5", 1),
    (r"\boxed{5 m^2}", "5", 1),
    (r"\boxed{12 marbles}", "12", 1),
    (r"\boxed{5 cm}", "5 m", 0),
    (r"\boxed{5 cm}", r"5\text{ cm}", 1),
    (r"\boxed{5 centimeters}", "5 cm", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{90°}", r"90^\circ", 1),
    (r"\boxed{6 cm}", "5", 0),
    (r"\boxed{60 km/h}", "60", 1),
    (r"\boxed{\$5}", "5", 1),
    (r"\boxed{5 dollars}", r"\$5", 1),
    (r"\boxed{5\text{ cm}}", "25", 0),
    # intervals, open and closed
    (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{[1,2]}", "(1,2)", 0),
    (r"\boxed{[1,2)}", "[1,2]", 0),
    (r"\boxed{\left[1,2\right)}", "[1, 2)", 1),
    (r"\boxed{(-\infty,3]}", r"(-\infty, 3]", 1),
    (r"\boxed{(-∞,3]}", r"(-\infty, 3]", 1),
    (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(3,\infty)\cup(-\infty,2)", 1),
    (r"\boxed{(-\infty,2]\cup(3,\infty)}", r"(-\infty,2)\cup(3,\infty)", 0),
    (r"\boxed{1<x<2}", "(1,2)", 1),
    (r"\boxed{x \le 5}", r"x \leq 5", 1),
    (r"\boxed{x<5}", r"x \le 5", 0),
    (r"\boxed{(0,\frac12)}", "(0, 0.5)", 1),
    (r"\boxed{[1,3]}", "[1,2]", 0),
    # sets without order, tuples with
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1),
    (r"\boxed{3, 1, 2}", "1,2,3", 1),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}", 0),
    (r"\boxed{\{1,3\}}", r"\{1,2\}", 0),
    (r"\boxed{\{0.5, 1\}}", r"\{1, \frac{1}{2}\}", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{(1,2,3)}", "(1,3,2)", 0),
    (r"\boxed{(1, 2, 3)}", "(1,2,3)", 1),
    (r"\boxed{(3,1)}", "(5,2)", 0),
    (r"\boxed{(\frac{1}{2},-1)}", "(0.5,-1)", 1),
    (r"\boxed{\{1,2\}}", "(1,2)", 0),
    (r"\boxed{(x,y)=(1,2)}", "(1,2)", 1),
    (r"\boxed{3 \text{ and } -3}", "3, -3", 1),
    (r"\boxed{\pm 3}", "3,-3", 1),
    (r"\boxed{x=3 or x=-3}", "3,-3", 1),
    (r"\boxed{x=3, x=-3}", r"\{-3,3\}", 1),
    (r"\boxed{3}", "3,-3", 0),
    (r"\boxed{3,-3}", "3", 0),
    (r"\boxed{(1,2)}", "(1,2,3)", 0),
    (r"\boxed{3, 4, 5, 6}", "5", 0),
    (r"\boxed{\{1,2\}}", "1,2", 1),
    # roots, pi, expressions, equations
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{2√2}", r"2\sqrt{2}", 1),
    (r"\boxed{√12}", r"2\sqrt{3}", 1),
    (r"\boxed{\sqrt2}", "2", 0),
    (r"\boxed{2π}", r"2\pi", 1),
    (r"\boxed{\pi}", r"2\pi", 0),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{x² - 1}", "(x-1)(x+1)", 1),
    (r"\boxed{x^2+1}", "x^2-1", 0),
    (r"\boxed{y = 2x+1}", "y=2x+1", 1),
    (r"\boxed{2x+1}", "y=2x+1", 1),
    (r"\boxed{x=5}", "x=5", 1),
    (r"\boxed{y=5}", "x=5", 0),
    (r"\boxed{5}", "x=5", 1),
    (r"\boxed{x=5}", "6", 0),
    (r"\boxed{3+4i}", "4i+3", 1),
    (r"\boxed{3-4i}", "3+4i", 0),
    (r"\boxed{5!}", "120", 1),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{|{-3}|}", "3", 1),
    (r"\boxed{e^2}", "e^2", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\ 2\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    (r"\boxed{1+\sqrt{2}}", r"\sqrt{2}+1", 1),
    ("x^2 + 1", "x^2+1", 1),
    (r"\boxed{3:4}", "3:4", 1),
    (r"\boxed{3:4}", "4:3", 0),
    (r"\boxed{\sin x}", r"\sin(x)", 1),
    (r"\boxed{\infty}", r"-\infty", 0),
    (r"\boxed{2 + 3}", "5", 1),
    (r"\boxed{0.\overline{3}}", r"0.\overline{3}", 1),
    # words and letters
    (r"\boxed{\text{Monday}}", "Monday", 1),
    (r"\boxed{monday}", "Monday", 1),
    ("The answer is Monday.", "Monday", 1),
    (r"\boxed{Tuesday}", "Monday", 0),
    (r"\boxed{silent}", "listen", 0),
    (r"\boxed{no solution}", r"\text{no solution}", 1),
    (r"\boxed{C}", "C", 1),
    (r"\boxed{B}", "C", 0),
    ("C", r"\text{C}", 1),
    (r"\boxed{\text{Yes}}", "yes", 1),
    (r"\boxed{\text{No}}", "yes", 0),
    (r"\boxed{odd}", "even", 0),
    (r"\boxed{True}", "False", 0),
    (r"\boxed{10:30}", "10:30", 1),
    (r"\boxed{2 hours and 30 minutes}", "2 hours and 30 minutes", 1),
    (r"\boxed{30}", "2 hours and 30 minutes", 0),
    # close to right
    (r"\boxed{41}", "42", 0),
    (r"\boxed{24}", "42", 0),
    (r"\boxed{420}", "42", 0),
    (r"\boxed{4.2}", "42", 0),
    (r"\boxed{1/3}", "3", 0),
    (r"\boxed{12345678901234567891}", "12345678901234567890", 0),
    (r"\boxed{1000001}", "1000000", 0),
    # prose in which not every number or formula is the answer
    ("答案是-3", "-3", 1),
    (r"答案是 \boxed{12}。", "12", 1),
    (r"So $x = \frac{3}{4}$ of the 12 pupils", "12", 1),
    (r"So the value is $\frac{3}{4}$", "3/4", 1),
    ("Let $x=2$ and $y=3$. Then $xy = 6$.", "6", 1),
    ("It costs $5 for one, $7 for two, and so $16 in all.", "16", 1),
    ("It costs $5 for one and so $16 in all.", "16", 1),
    # as the golds of MATH look
    (r"\boxed{\frac{\pi}{4}}", r"\pi/4", 1),
    (r"\boxed{6\pi \text{ cm}^2}", r"6\pi", 1),
    (r"\boxed{x \in [-2,7]}", "[-2,7]", 1),
    (r"\boxed{11,\! 111}", "11111", 1),
    (r"\boxed{2^{1/3}}", r"\sqrt[3]{2}", 1),
    (r"\boxed{10101_2}", "10101_2", 1),
    (r"\boxed{-\frac52 x}", r"-\frac{5x}{2}", 1),
    (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
    (r"\boxed{1 \frac{1}{2}}", "1.5", 1),
    (r"\boxed{q-p}", "p - q", 0),
    (r"\boxed{\$32,\!348}", "32348", 1),
    ("It is 5.4 cents", r"5.4 \text{ cents}", 1),
    (r"\boxed{864}", r"864 \mbox{ inches}^2", 1),
    (r"\boxed{E}", r"\text{(E)}", 1),
    (r"\boxed{-2x+3}", "y=-2x+3", 1),
    (r"\boxed{3x - 6 + x^3}", "x^3+3x-6", 1),
    (r"\boxed{0.125}", r"\frac18", 1),
    (
        r"\boxed{\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}}",
        r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
        1,
    ),
    (r"\boxed{-2,1}", "1,-2", 1),
    (r"\boxed{14916.}", "14916", 1),
    (r"\boxed{(0, \infty) \cup (-\infty, 0)}", r"(-\infty, 0) \cup (0, \infty)", 1),
    (r"\boxed{3\sqrt{13}}", r"\sqrt{117}", 1),
    (r"\boxed{\frac{3 \sqrt{3}}{4}}", r"\frac{3\sqrt3}{4}", 1),
    (r"\boxed{(6,31,-1)}", "(6,31,-1)", 1),
    (r"\boxed{(6,31,1)}", "(6,31,-1)", 0),
    (r"\boxed{\cot x}", r"\cot x", 1),
    (r"\boxed{6-5i}", "6 - 5i", 1),
    (r"\boxed{\frac{1}{3}\pi}", r"\frac{\pi}{3}", 1),
    (r"\boxed{120^\circ}", r"120^\circ", 1),
    (r"\boxed{x>3}", r"(3,\infty)", 1),
    (r"\boxed{x \geq 3}", r"(3,\infty)", 0),
    (r"\boxed{\frac{4}{3} \approx 1.33}", r"\frac43", 1),
    (r"\boxed{5\%}", "0.05", 1),
    (r"\boxed{18}", "#### 18", 1),
    (r"\boxed{7:30}", "7:30", 1),
    (r"\boxed{2x}", "x", 0),
    (r"\boxed{2}", "2x", 0),
    ("So $x=4$.\n\nTherefore, the final answer is \\(4\\).", "4", 1),
    ("The answer is **4**.", "4", 1),
    ("### Answer: \n $$\\frac{1}{4}$$", "0.25", 1),
    ("So the answer is: (1, 2).", "(1,2)", 1),
    ("the answer is [2, 3)", "[2,3)", 1),
    ("answer: x^2+1", "x^2+1", 1),
    ("My answer is 3.50 dollars", "3.5", 1),
    ("So the speed is 60 km/h.", "60", 1),
    ("The total is 1,234.50.", "1234.5", 1),
    ("Area: 25 cm^2", "25", 1),
    (r"It is \(\sqrt{2}\)", r"\sqrt{2}", 1),
    (r"She pays \$18 for $x$ = 2 items, so \$36.", "36", 1),
    (r"\boxed{1000000000000}", "10^{12}", 1),
    (r"\boxed{5 or 6}", "5", 0),
    (r"\boxed{5, 6}", "6", 0),
    (r"\boxed{5=6}", "5", 0),
    (r"\boxed{5 \neq 6}", "5", 0),
    (r"\boxed{-1/2}", "1/2", 0),
    (r"\boxed{a+b}", "b+a", 1),
    (r"\boxed{ab}", "ba", 1),
    (r"\boxed{\text{all real numbers}}", r"\text{all real numbers}", 1),
    (r"\boxed{3x+2y=6}", "2y+3x=6", 1),
    (r"\boxed{3x+2y=6}", "3x+2y=7", 0),
    (r"\boxed{6x+4y=12}", "3x+2y=6", 1),
    (r"\boxed{0}", "", 0),
    (r"\boxed{x}", "y", 0),
    (r"\boxed{2,3}", "2.3", 0),
    (r"\boxed{1.234}", "1,234", 0),
    (r"\boxed{1,5}", "1.5", 0),
    (r"\boxed{0.5\%}", "0.5", 1),
    (r"\boxed{{5}}", "5", 1),
    (r"\boxed{(5)}", "5", 1),
    (r"\boxed{5\text{ or }-5}", r"\pm 5", 1),
    (r"\boxed{n=5}", "5", 1),
    (r"\boxed{\frac{5}{0}}", "5", 0),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1", 1),
    (r"\boxed{5\mathrm{~cm}}", "5", 1),
    (r"\boxed{5~\text{cm}}", "5", 1),
    (r"\boxed{5\;\text{m/s}}", "5", 1),
    (r"\boxed{\displaystyle\frac12}", "1/2", 1),
    (r"\boxed{x=1,y=2}", "x=1, y=2", 1),
    (r"\boxed{x=2,y=1}", "x=1,y=2", 0),
    (r"\boxed{1/2, 1/3}", r"\frac13,\frac12", 1),
    (r"\boxed{$5$}", "5", 1),
    (r"\boxed{2 \sqrt 3}", r"2\sqrt{3}", 1),
    (r"\boxed{2*3}", "6", 1),
    (r"\boxed{2}", "2 million", 0),
    (r"\boxed{2 000 000}", "2000000", 1),
    (r"\boxed{\frac{1}{1+x}}", r"\frac{1}{x+1}", 1),
]


@pytest.mark.parametrize("completion, answer, reward", MATH)
def test_math_agrees_with_a_careful_human(completion, answer, reward):
    assert verify.math(completion, {"answer": answer}) == reward


KNOWN_LIMITS = [  # what math gives, where a careful human would say the opposite
    (r"\boxed{(2,1)}", "1,2", 1),  # a gold without brackets is a set
    (r"\boxed{AB}", "BA", 1),  # A*B: short names are products
    (r"\boxed{5 feet}", "5 meters", 1),  # units are not compared
    (r"\boxed{50\%}", r"0.5", 1),  # and also 50: of the two, one is wrong
    (r"\boxed{10:30}", "21:63", 1),  # a ratio, not a time
    (r"\boxed{3 = 5}", "5", 1),  # of an equation, the right side
    (r"\boxed{4 + 1}", "5", 1),  # not worked out
    (r"\boxed{3.1415927}", r"\pi", 1),  # equal when rounded to six places
    (r"\boxed{5=x}", "5", 0),
    (r"\boxed{1,2}", "(1,2)", 1),  # brackets forgotten
    (r"\boxed{\text{(C)}}", "C", 0),  # use choice
    (r"\boxed{2 million}", "2000000", 0),
    (r"\boxed{2**3}", "8", 0),  # Python, not LaTeX
    (r"\boxed{\ln 2}", r"\log 2", 0),
    (r"\boxed{\mathbb{R}}", r"\text{all real numbers}", 0),
    ("The solutions are 1 and 2.", "1, 2", 0),  # in prose without a marker, the last number
]


@pytest.mark.parametrize("completion, answer, reward", KNOWN_LIMITS)
def test_math_has_these_known_limits(completion, answer, reward):
    assert verify.math(completion, {"answer": answer}) == reward


def test_math_sets_no_timer():
    """math-verify's timeouts raise outside the main thread, and would count a hang as wrong instead of failed."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(verify.math, r"\boxed{\sqrt{8}}", {"answer": r"2\sqrt{2}"}).result() == 1.0


@pytest.mark.parametrize(
    "text", ["1 " * 20_000, "(" * 20_000, "$" * 20_000, "9" * 20_000, r"\boxed{" * 5_000, "1,234," * 5_000]
)
def test_garbage_of_full_length_is_wrong_and_quick(text):
    script = "import sys, verify; text = sys.stdin.read(); row = {'answer': 'x'}\n"
    script += "print(verify.number(text, row), verify.choice(text, row), verify.math(text, row))"
    done = subprocess.run([sys.executable, "-c", script], input=text, capture_output=True, text=True, timeout=10)
    assert done.stdout == "0.0 0.0 0.0\n", done.stderr


def test_import_needs_none_of_the_packages():
    script = "import sys, verify; print(*{'sympy', 'math_verify', 'reasoning_gym'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_every_verifier_is_listed_by_its_name():
    assert all(function.__name__ == name for name, function in verify.VERIFIERS.items())
    assert {*verify.VERIFIERS} == {"exact", "number", "choice", "math", "gym"} > {*verify.PACKAGES}


def gym_row(task: str, index: int = 3, **config) -> dict:
    """A row as a data loader makes it, through JSON."""
    entry = verify.gym_dataset(task, 5, json.dumps(config))[index]
    row = {"answer": entry["answer"] or "", "gym": {"task": task, "seed": 5, "index": index, "config": config}}
    return json.loads(json.dumps(row))


@pytest.mark.parametrize(
    "task, config",
    [
        ("chain_sum", {"max_terms": 3}),
        ("prime_factorization", {}),
        ("knights_knaves", {}),  # metadata: nested tuples
        ("mini_sudoku", {}),  # many lines
        ("number_sorting", {}),  # JSON
        ("gcd", {}),  # the default scorer
        ("gsm_symbolic", {"size": 10}),  # lists `size` tasks at once
        ("countdown", {}),  # many right answers; run as code
        ("game_of_life_halting", {}),
        ("spiral_matrix", {}),
    ],
)
@pytest.mark.parametrize(
    "form", ["{}", "Hm, 7?\n<answer>0</answer> or <answer> {} </answer>", "So \\boxed{{{}}}", "The answer is {}"]
)
def test_gym_finds_the_answer_in_each_form(task, config, form):
    row = gym_row(task, **config)
    assert verify.gym(form.format(row["answer"]), row) == 1.0


WRONG = [
    "",
    "x",
    "nan",
    "[]",
    "{}",
    "(1",
    "[NaN, NaN, NaN, NaN]",
    "nan+nanj",
    "6*4*1*1 = 25",
    "exit()",
    "1e999",
    '{"a": 1}',
]
GYM_TASKS = ["chain_sum", "prime_factorization", "knights_knaves", "propositional_logic", "boxnet", "rubiks_cube"]
GYM_TASKS += [
    "complex_arithmetic",
    "game_of_life_halting",
    "coin_flip",
    "n_queens",
    "countdown",
    "time_intervals",
    "gcd",
]


@pytest.mark.parametrize("task", GYM_TASKS)
@pytest.mark.parametrize("garbage", WRONG)
def test_gym_gives_nothing_for_garbage(task, garbage):
    assert verify.gym(garbage, gym_row(task)) == verify.gym(f"<answer>{garbage}</answer>", gym_row(task)) == 0.0


@pytest.mark.parametrize(
    "task, form",
    [
        ("chain_sum", " ".join(map(str, range(-2000, 2001)))),  # all numbers: the last is not it
        ("chain_sum", "<answer>{} 7</answer>"),
        ("chain_sum", "{}0"),
        ("gcd", "{}, or 977"),  # the default scorer: 1/9 for "1, or 977"
        ("syllogism", "Yes No"),  # substring of either answer
        ("caesar_cipher", "It may be {}."),
        ("gsm_symbolic", "-{}"),  # its scorer drops the sign
        ("word_sorting", "<answer>{}, zoo</answer>"),
        ("coin_flip", "0"),
        ("time_intervals", "{}1"),
        ("spell_backward", "<answer>{}x</answer>"),
    ],
)
def test_gym_is_not_hacked(task, form):
    row = gym_row(task)
    assert verify.gym(form.format(row["answer"]), row) == 0.0


def test_gym_reads_a_number_as_people_write_it():
    row = gym_row("chain_sum", min_digits=4)
    value = int(row["answer"])
    assert abs(value) > 999  # so there is a comma
    assert verify.gym(f"The sum is ${value:,}", row) == 1.0
    assert verify.gym(f"The answer is {value}.00, since 3 + 4 is 7.", row) == 1.0
    assert verify.gym(f"The answer is {-value}", row) == 0.0


def test_gym_task_without_an_answer_is_scored_by_its_task():
    row = gym_row("propositional_logic")
    metadata = verify.gym_dataset("propositional_logic", 5, "{}")[3]["metadata"]
    assert row["answer"] == ""
    assert verify.gym(metadata["example_answer"], row) == 1.0  # any conclusion that follows from the premises
    assert verify.gym("None", row) == 0.0


def test_gym_makes_the_same_entry_in_another_process():
    """Where the order of a set decides, it does not: see GYM_REFUSED."""
    rows = [gym_row(task) for task in ["chain_sum", "knights_knaves", "mini_sudoku", "zebra_puzzles", "graph_color"]]
    script = f"import verify; print(*(verify.gym('x', row) for row in {rows!r}))"  # another answer would raise
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "0.0 0.0 0.0 0.0 0.0\n", done.stderr


@pytest.mark.parametrize(
    "answer", ["__import__('os').getpid()", "S('25')", "exec(chr(49))", "ｅｘｅｃ(1)", "Integral(x, x)"]
)
def test_gym_never_runs_an_answer_as_code(answer, monkeypatch):
    dataset, row = verify.gym_dataset("countdown", 5, "{}"), gym_row("countdown")
    monkeypatch.setattr(type(dataset), "score_answer", lambda *_, **__: 1.0)  # whatever reaches the scorer is right
    assert verify.gym("(1 + sqrt(x)) / 2", row) == 1.0
    assert verify.gym(answer, row) == 0.0


def test_gym_scores_each_completion_against_an_unchanged_entry(monkeypatch):
    row = gym_row("rubiks_cube")
    seen = []

    def score_answer(self, answer, entry):
        seen.append(entry["metadata"].get("mark"))
        entry["metadata"]["mark"] = answer
        return 0.0

    monkeypatch.setattr(type(verify.gym_dataset("rubiks_cube", 5, "{}")), "score_answer", score_answer)
    assert [verify.gym("R", row), verify.gym("U", row), seen] == [0.0, 0.0, [None, None]]


@pytest.mark.parametrize("task", sorted(verify.GYM_REFUSED))
def test_gym_task_that_cannot_be_verified_is_refused(task):
    with pytest.raises(ValueError, match=f"{task}.* cannot be verified"):
        verify.gym_dataset(task, 5, "{}")


def test_gym_task_that_only_compares_needs_no_entry():
    """So rows of list_functions can be scored, which makes other entries each time."""
    row = gym_row("list_functions")
    row["gym"]["seed"] = 6
    assert verify.gym(row["answer"], row) == 1.0


def test_gym_row_of_another_version_stops_the_run():
    row = gym_row("chain_sum")
    row["answer"] += "0"
    with pytest.raises(ValueError, match="now has the answer"):
        verify.gym("7", row)
