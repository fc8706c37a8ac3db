/* Questions above the front page's symptoms: an answer hides what does not fit it, and opens what the answers decide. All that is
   said stands in the symptoms themselves, with classes that name the answers they belong to; without this they are a list. */
(() => {
  // A question's name, its words, its answers, and what stands for none.
  const QUESTIONS = [
    ["changed", "What changed?", {
      logits: "logits or hidden states", text: "the generated text", loss: "loss or perplexity", speed: "the speed",
      equal: "nothing may change",
    }, "any"],
    ["dtype", "In fp32 or fp64?", {
      32: "it differs there too", 16: "it is equal there, and differs in bf16 or fp16",
    }, "I have not tried"],
    ["loop", "Who feeds the tokens?", { generate: "generate", own: "my own loop" }, "any"],
    ["ids", "Do the ids continue the cached ones?", { yes: "yes, I compared them", no: "no" }, "I did not look"],
    ["past", "Longer than the block or window?", { no: "no", yes: "yes" }, "I do not know"],
  ];

  /* Say of every symptom, a list of classes, whether it is hidden and whether it is open. What names a question that has no
     answer stays closed: the general advice opens in its place. What names one question alone says too little to be opened,
     unless nothing else is left. */
  function decide(symptoms, answers) {
    const about = symptoms.map((classes) => {
      const named = QUESTIONS.map(([name]) => [
        answers[name], classes.filter((one) => one.startsWith(`${name}-`)).map((one) => one.slice(name.length + 1)),
      ]).filter(([, own]) => own.length);
      return {
        general: classes.includes("general"),
        hidden: named.some(([answer, own]) => answer && !own.includes(answer)),
        decided: named.every(([answer, own]) => own.includes(answer)),
        named: named.length,
      };
    });
    const left = about.filter((one) => !one.hidden && !one.general).length;
    const open = about.map((one) => !one.hidden && !one.general && one.decided && (one.named > 1 || left === 1));
    const asked = Object.values(answers).some(Boolean);
    return about.map((one, place) => ({
      hidden: one.hidden, open: open[place] || (one.general && !one.hidden && asked && !open.includes(true)),
    }));
  }

  function enable(symptoms) {
    const form = document.createElement("form");
    form.className = "kvbook-picker";
    form.setAttribute("aria-label", "Find your symptom");
    for (const [name, words, answers, none] of QUESTIONS) {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.name = name;
      select.append(new Option(none, ""), ...Object.entries(answers).map(([value, text]) => new Option(text, value)));
      label.append(words, select);
      form.append(label);
    }
    const count = document.createElement("output");
    const reset = document.createElement("button");
    reset.type = "reset";
    reset.textContent = "Start again";
    const last = document.createElement("div");
    last.append(reset, count);
    form.append(last);

    function apply() {
      const answers = Object.fromEntries(QUESTIONS.map(([name]) => [name, form.elements[name].value]));
      const decided = decide(symptoms.map((symptom) => [...symptom.classList]), answers);
      symptoms.forEach((symptom, place) => Object.assign(symptom, decided[place]));
      count.value = `${decided.filter((one) => !one.hidden).length} of ${symptoms.length} fit`;
    }

    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    // The fields are emptied only after this event.
    form.addEventListener("reset", () => setTimeout(apply));
    symptoms[0].before(form);
    // A browser that goes back may remember answers.
    apply();
  }

  // The tests call it without a page.
  if (typeof document === "undefined") {
    module.exports = { QUESTIONS, decide };
    return;
  }
  document.addEventListener("DOMContentLoaded", () => {
    const symptoms = [...document.querySelectorAll("details.symptom")];
    if (symptoms.length) enable(symptoms);
  });
})();
