/* Classifies an image with a packed network, in C.

     gcc classify.c $(pkg-config --cflags --libs unflip) -o classify
     ./classify model.unflip image.ppm

   docs/deploy.md says where pkg-config finds unflip.
   The image is a binary PPM (colour) or PGM (grey) with 256 levels, and has the model's size. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include <unflip.h>

static int fail(const char* what) {
  fprintf(stderr, "classify: %s\n", what);
  return 1;
}

/* Reads the next number of the image's header, which may contain comments. */
static int read_number(FILE* file) {
  int c = fgetc(file), number = 0, digits = 0;
  for (; isspace(c) || c == '#'; c = fgetc(file))
    if (c == '#')
      while (c != '\n' && c != EOF) c = fgetc(file);
  for (; isdigit(c) && digits < 6; c = fgetc(file), digits++) number = number * 10 + (c - '0');
  return digits > 0 && isspace(c) ? number : -1;
}

/* Pixels as C x H x W, normalized as the file specifies. */
static float* read_image(const char* path, const unflip_model* model) {
  int shape[3];
  double mean[3], deviation[3];
  if (unflip_input_shape(model, shape) != 0) return fail(unflip_error()), NULL;
  const int channels = shape[0], height = shape[1], width = shape[2];
  if (channels != 1 && channels != 3) return fail("this model takes no image of 1 or 3 channels"), NULL;
  if (unflip_preprocess(model, mean, deviation) != 0) return fail(unflip_error()), NULL;
  FILE* file = fopen(path, "rb");
  if (file == NULL) return fail("the image cannot be opened"), NULL;
  char magic[2] = {0, 0};
  const size_t size = (size_t)channels * (size_t)height * (size_t)width;
  float* values = NULL;
  unsigned char* pixels = malloc(size);
  if (pixels == NULL || fread(magic, 1, 2, file) != 2 || magic[0] != 'P' || magic[1] != (channels == 3 ? '6' : '5')) {
    fail(channels == 3 ? "the image must be a binary PPM (P6)" : "the image must be a binary PGM (P5)");
  } else if (read_number(file) != width || read_number(file) != height || read_number(file) != 255) {
    fprintf(stderr, "classify: the image must have %d x %d pixels and 256 levels\n", width, height);
  } else if (fread(pixels, 1, size, file) != size) {
    fail("the image is cut off");
  } else if ((values = malloc(size * sizeof *values)) != NULL) {
    for (size_t i = 0; i < size; i++) { /* from H x W x C to C x H x W */
      const size_t channel = i % (size_t)channels, pixel = i / (size_t)channels;
      values[channel * (size_t)(height * width) + pixel] = (float)((pixels[i] / 255.0 - mean[channel]) / deviation[channel]);
    }
  }
  free(pixels);
  fclose(file);
  return values;
}

/* Prints the name of a class, or its number if the file has no names. */
static void print_label(const unflip_model* model, int index) {
  char shown[200]; /* a terminal must not interpret text from a file */
  if (index >= unflip_labels(model)) {
    printf("class %d", index);
    return;
  }
  unflip_printable(unflip_label(model, index), shown, sizeof shown);
  printf("%s", shown);
}

static void print_best(const unflip_model* model, float* outputs, int classes) {
  for (int rank = 0; rank < 5 && rank < classes; rank++) {
    int best = 0;
    for (int i = 1; i < classes; i++)
      if (outputs[i] > outputs[best]) best = i;
    printf("%10.4f  ", (double)outputs[best]);
    print_label(model, best);
    printf("\n");
    outputs[best] = -3.4e38f;
  }
}

int main(int count, char** arguments) {
  if (count != 3) return fail("usage: classify MODEL.unflip IMAGE.ppm");
  unflip_model* model = unflip_load(arguments[1], 1, NULL);
  if (model == NULL) return fail(unflip_error());
  int out[3], failed = 1;
  if (unflip_output_shape(model, out) != 0) { /* several outputs, such as a detector's: not only class scores */
    fail(unflip_error());
    unflip_free(model);
    return 1;
  }
  float* input = read_image(arguments[2], model);
  float* output = malloc(sizeof(float) * (size_t)out[0] * (size_t)out[1] * (size_t)out[2]);
  if (input != NULL && output != NULL) {
    failed = unflip_run(model, input, 1, output);
    if (failed) {
      fail(unflip_error());
    } else {
      print_best(model, output, out[0] * out[1] * out[2]);
    }
  }
  free(input);
  free(output);
  unflip_free(model);
  return failed;
}
