// Drawings for CIFAR-10 networks, made for this page: no images of the data set. Each is 64 × 64.

const scene = (sky, ground, shapes) =>
  `<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64" viewBox="0 0 64 64"><defs>
  <linearGradient id="s" x2="0" y2="1"><stop stop-color="${sky[0]}"/><stop offset="1" stop-color="${sky[1]}"/></linearGradient>
  <linearGradient id="g" x2="0" y2="1"><stop stop-color="${ground[0]}"/><stop offset="1" stop-color="${ground[1]}"/></linearGradient>
  </defs><rect width="64" height="64" fill="url(#s)"/>${shapes}</svg>`;

export const SAMPLES = [
  {
    label: "airplane",
    svg: scene(["#6fa8dc", "#cfe2f3"], ["#fff", "#fff"],
      `<path d="M6 36 q2-5 10-5 h30 q10 0 13 4 q-4 4-13 4 h-30 q-8 0-10-3z" fill="#f2f4f7" stroke="#8d99a6"/>
       <path d="M28 34 l-10 18 h6 l16-17z" fill="#c3ccd6"/><path d="M30 31 l-6-13 h5 l12 13z" fill="#d7dee6"/>
       <path d="M10 32 l-5-12 h6 l7 11z" fill="#b02a30"/><path d="M48 34 h8" stroke="#34495e" stroke-width="2"/>`),
  },
  {
    label: "automobile",
    svg: scene(["#dfe7ee", "#f4f6f8"], ["#8a8d91", "#5d6064"],
      `<rect y="44" width="64" height="20" fill="url(#g)"/>
       <path d="M5 46 v-9 q1-4 8-5 l9-10 q2-2 6-2 h16 q4 0 6 3 l6 10 q4 1 4 6 v7z" fill="#c62828"/>
       <path d="M24 24 h8 v8 h-15z M35 24 h9 l5 8 h-14z" fill="#243447"/>
       <circle cx="17" cy="47" r="6.5" fill="#1c1c1c"/><circle cx="17" cy="47" r="3" fill="#9aa0a6"/>
       <circle cx="47" cy="47" r="6.5" fill="#1c1c1c"/><circle cx="47" cy="47" r="3" fill="#9aa0a6"/>`),
  },
  {
    label: "ship",
    svg: scene(["#9cc3e6", "#e3eef7"], ["#2f6690", "#16425b"],
      `<rect y="42" width="64" height="22" fill="url(#g)"/>
       <path d="M4 36 h56 l-7 13 h-42z" fill="#7b1e22"/><path d="M4 36 h56 l-1 3 h-54z" fill="#f1f1f1"/>
       <path d="M18 25 h26 v11 h-26z" fill="#f7f7f7"/><path d="M24 16 h13 v9 h-13z" fill="#e6e6e6"/>
       <path d="M40 12 h6 v13 h-6z" fill="#d9822b"/><path d="M21 29 h20" stroke="#4a6fa5" stroke-width="2" stroke-dasharray="3 2"/>`),
  },
  {
    label: "truck",
    svg: scene(["#d8e3ea", "#eef3f6"], ["#7f8387", "#54585c"],
      `<rect y="46" width="64" height="18" fill="url(#g)"/>
       <rect x="3" y="15" width="37" height="31" fill="#f5f5f0" stroke="#b9bdb5"/>
       <path d="M41 24 h11 l8 11 v12 h-19z" fill="#1f5fa8"/><path d="M44 27 h7 l5 8 h-12z" fill="#cfe6f5"/>
       <rect x="3" y="44" width="57" height="4" fill="#33383d"/>
       <circle cx="14" cy="49" r="6" fill="#1b1b1b"/><circle cx="27" cy="49" r="6" fill="#1b1b1b"/>
       <circle cx="51" cy="49" r="6" fill="#1b1b1b"/><circle cx="51" cy="49" r="2.5" fill="#aaa"/>`),
  },
  {
    label: "horse",
    svg: scene(["#bcd7ea", "#e9f2e1"], ["#7fa650", "#55752f"],
      `<rect y="44" width="64" height="20" fill="url(#g)"/>
       <path d="M16 30 q10-4 22 0 l7-12 q1-3 5-4 l3-4 l1 5 q4 4 6 9 q-1 3-4 2 l-5-2 l-6 13 q-2 4-4 5 l1 14 h-4 l-2-13 h-14 l-2 13 h-4
       l1-15 q-5-3-4-9z" fill="#6d4322"/><path d="M16 31 q-7 3-6 14 q4-5 8-8z" fill="#2e1b0d"/>
       <path d="M46 15 q-6 6-9 14 l4 1 q4-8 8-13z" fill="#2e1b0d"/>`),
  },
  {
    label: "frog",
    svg: scene(["#b9a27c", "#8c7650"], ["#6b5a3b", "#4d4029"],
      `<ellipse cx="32" cy="42" rx="20" ry="14" fill="#5d8a2f"/><ellipse cx="32" cy="48" rx="13" ry="8" fill="#b9c77a"/>
       <path d="M14 44 q-8 6-4 12 h12 q-6-4-4-9z M50 44 q8 6 4 12 h-12 q6-4 4-9z" fill="#4b7324"/>
       <ellipse cx="32" cy="30" rx="15" ry="10" fill="#6a9a36"/><circle cx="22" cy="22" r="5" fill="#6a9a36"/>
       <circle cx="42" cy="22" r="5" fill="#6a9a36"/><circle cx="22" cy="21" r="2.5" fill="#141a0b"/>
       <circle cx="42" cy="21" r="2.5" fill="#141a0b"/><path d="M21 33 q11 6 22 0" stroke="#35521a" fill="none" stroke-width="1.5"/>`),
  },
];
