// Classifies one image and prints the class. Fill `pixels` from your camera: HEIGHT x WIDTH x CHANNELS bytes.
#include <network.h>

static uint8_t pixels[NETWORK_HEIGHT * NETWORK_WIDTH * NETWORK_CHANNELS];
static uint64_t arena[(NETWORK_ARENA_BYTES + 7) / 8];
static float scores[NETWORK_SCORES];

void setup() { Serial.begin(115200); }

void loop() {
  const unsigned long start = millis();
  if (network_run(pixels, scores, arena) != 0) {
    Serial.println("a pointer is null or the arena is not aligned");
    return;
  }
  const unsigned long took = millis() - start;
  int best = 0;
  for (int i = 1; i < NETWORK_SCORES; i++)
    if (scores[i] > scores[best]) best = i;
  Serial.print("class ");
  Serial.print(best);
  Serial.print(", ms ");
  Serial.println(took);
  delay(1000);
}
