"""CUDA's matrix units and asynchronous copies, in the emulator's terms."""

# For `mma.CUDA` and `attention.STREAM`: copies are made when they are waited for, and leave NaNs
# until then; a matrix product gathers the lanes' fragments.
MATRIX_UNITS = r"""
alignas(1024) static unsigned char shared_bytes[1 << 18];
#define SHARED(name) unsigned char* const name = shared_bytes
static float element(unsigned word, int i) { return bf16_value(i ? word >> 16 : word); }
static void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const Values* all = exchange({a[0], a[1], a[2], a[3], b0, b1});
  for (int i = 0; i < 4; ++i) {
    const int lane = lane_now % LANES, row = lane / 4, column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2;
      const unsigned left = all[row * 4 + t].words[i / 2 + k / 8 * 2];
      c[i] += element(left, k % 2) * element(all[column * 4 + t].words[4 + k / 8], k % 2);
    }
  }
}
static void load_8x8s(unsigned* to, const void* row, bool transposed) {
  const uint64_t address = (uint64_t)row;
  const Values* all = exchange({unsigned(address), unsigned(address >> 32)});
  const int across = lane_now % LANES / 4, along = 2 * (lane_now % 4);
  for (int m = 0; m < 4; ++m) {
    to[m] = 0;
    for (int i = 0; i < 2; ++i) {
      const int from = transposed ? along + i : across, column = transposed ? across : along + i;
      const Values& own = all[8 * m + from];
      const uint64_t start = own.words[0] | (uint64_t(own.words[1]) << 32);
      to[m] |= unsigned(((const uint16_t*)start)[column]) << 16 * i;
    }
  }
}
static void load_matrices(unsigned* to, const void* row) { load_8x8s(to, row, false); }
static void load_transposed(unsigned* to, const void* row) { load_8x8s(to, row, true); }
struct Copy { void* to; const void* from; int bytes; long group; };
static Copy copies[MOST][128];
static int copies_left[MOST];
static long copy_groups[MOST];
template <int bytes> static void copy(void* to, const void* from) {
  if (copies_left[lane_now] == 128) *(volatile int*)nullptr = 0;
  memset(to, 0xff, bytes);
  copies[lane_now][copies_left[lane_now]++] = {to, from, bytes, copy_groups[lane_now]};
}
static void copy16(void* to, const void* from) { copy<16>(to, from); }
static unsigned times(unsigned a, unsigned b) {
  const unsigned low = bf16_bits(element(a, 0) * element(b, 0));
  return bf16_bits(element(a, 1) * element(b, 1)) << 16 | low;
}
static unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
  const unsigned low = bf16_bits(element(a, 0) * element(b, 0) + element(c, 0));
  return bf16_bits(element(a, 1) * element(b, 1) + element(c, 1)) << 16 | low;
}
static void commit() { ++copy_groups[lane_now]; }
template <int left> static void wait() {
  int kept = 0;
  for (int i = 0; i < copies_left[lane_now]; ++i) {
    const Copy& each = copies[lane_now][i];
    if (each.group < copy_groups[lane_now] - left) {
      memcpy(each.to, each.from, each.bytes);
    } else {
      copies[lane_now][kept++] = each;
    }
  }
  copies_left[lane_now] = kept;
}
static uint4 stream16(const uint4* from) { return *from; }
"""

# For `mma.wgmma` of all sizes. Products are computed when they are waited for, so that operands
# overwritten before that give wrong results. Operands in shared memory are found by the hardware's
# 64-bit descriptors: their start, and the bytes between their parts.
WARPGROUP = r"""
static unsigned __cvta_generic_to_shared(const void* at) {
  return (const unsigned char*)at - shared_bytes;
}
// Of a row, which lies in 128 bytes and at `across` the next; eight rows are beside each other.
static float number(uint64_t matrix, int row, int column) {
  const unsigned across = (matrix >> 16 & 0x3fff) << 4, down = (matrix >> 32 & 0x3fff) << 4;
  const unsigned start = (matrix & 0x3fff) << 4;
  unsigned at = start + column / 64 * across + column % 64 * 2 + row / 8 * down + row % 8 * 128;
  at ^= (at >> 7 & 7) << 4;
  return bf16_value(*(const uint16_t*)(shared_bytes + at));
}
// Accumulator i of a lane.
static int row_of(int i) {
  return lane_now / LANES % 4 * 16 + lane_now % LANES / 4 + i / 2 % 2 * 8;
}
static int column_of(int i) { return i / 4 * 8 + lane_now % 4 * 2 + i % 2; }
static void add_products(float* c, int n, float (&a)[2][16], uint64_t b, bool across, int add) {
  if (b >> 62 != 1) add = 0, a[0][0] = a[1][0] = as_float(0x7fc00000);  // not swizzled by 128
  for (int i = 0; i < n; ++i) {
    float sum = add ? c[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const int column = column_of(i);
      sum += a[i / 2 % 2][k] * (across ? number(b, k, column) : number(b, column, k));
    }
    c[i] = sum;
  }
}
struct Product {
  float* c;
  int n;
  const unsigned* registers;
  uint64_t left, right;
  int add, group;
};
static Product products[MOST][64];
static int products_left[MOST], product_groups[MOST];
static void issue(Product product) {
  product.group = product_groups[lane_now];
  products[lane_now][products_left[lane_now]++] = product;
}
static void compute(const Product& of) {
  float a[2][16];
  const unsigned* r = of.registers;
  const Values* all = r ? exchange({r[0], r[1], r[2], r[3]}) : nullptr;
  for (int i = 0; i < 32; ++i) {
    const int h = i / 16, k = i % 16, lane = lane_now % LANES / 4 * 4 + k % 8 / 2;
    a[h][k] = all ? element(all[lane].words[h + k / 8 * 2], k % 2)
                  : number(of.left, row_of(2 * h), k);
  }
  add_products(of.c, of.n, a, of.right, all, of.add);
}
template <int n>
static void multiply(float (&c)[n], uint64_t left, uint64_t right, int add = 1) {
  issue({c, n, nullptr, left, right, add, 0});
}
template <int n>
static void multiply(float (&c)[n], const unsigned* left, uint64_t right, int add = 1) {
  issue({c, n, left, 0, right, add, 0});
}
static void commit_products() { ++product_groups[lane_now]; }
template <int left> static void wait_products() {
  const int me = lane_now;
  int kept = 0;
  for (int i = 0; i < products_left[me]; ++i) {
    if (products[me][i].group < product_groups[me] - left) {
      compute(products[me][i]);
    } else {
      products[me][kept++] = products[me][i];
    }
  }
  products_left[me] = kept;
}
template <int n> static void hold(float (&)[n]) {}
template <int n> static void hold(unsigned (&)[n]) {}
static void begin_products() {}
static void publish() {}
static float power(float x) { return exp2f(x); }
static unsigned packed(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }
"""
