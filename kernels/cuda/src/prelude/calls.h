/* Names under which emitted kernels call functions of the prelude in which threads meet: on the host
 * each call is a place of its own. Comes last; includes nothing. */
struct sh_called {
  sh_place at;
#define SH_CALLED(name)                                             \
  template <int... N, class... A> auto name(A &&...a) const {       \
    const sh_call call(at);                                         \
    return ::name<N...>(a...);                                      \
  }
#define SH_CALLED_PLAIN(name)                                       \
  template <class... A> auto name(A &&...a) const {                 \
    const sh_call call(at);                                         \
    return ::name(a...);                                            \
  }
  SH_CALLED(sh_block_sum) SH_CALLED(sh_block_prod) SH_CALLED(sh_block_max) SH_CALLED(sh_block_min)
  SH_CALLED(sh_group_sum) SH_CALLED(sh_group_prod) SH_CALLED(sh_group_max) SH_CALLED(sh_group_min)
  SH_CALLED_PLAIN(sh_shuffle_xor) SH_CALLED_PLAIN(sh_shuffle_down) SH_CALLED_PLAIN(sh_shuffle)
  SH_CALLED_PLAIN(sh_ballot) SH_CALLED_PLAIN(sh_mma_bf16) SH_CALLED_PLAIN(sh_mma_f16)
#undef SH_CALLED
#undef SH_CALLED_PLAIN
};
#define SH_CALL sh_called{{__COUNTER__ + 1, __LINE__}}
#define sh_block_sum SH_CALL.sh_block_sum
#define sh_block_prod SH_CALL.sh_block_prod
#define sh_block_max SH_CALL.sh_block_max
#define sh_block_min SH_CALL.sh_block_min
#define sh_group_sum SH_CALL.sh_group_sum
#define sh_group_prod SH_CALL.sh_group_prod
#define sh_group_max SH_CALL.sh_group_max
#define sh_group_min SH_CALL.sh_group_min
#define sh_shuffle_xor SH_CALL.sh_shuffle_xor
#define sh_shuffle_down SH_CALL.sh_shuffle_down
#define sh_shuffle SH_CALL.sh_shuffle
#define sh_ballot SH_CALL.sh_ballot
#define sh_mma_bf16 SH_CALL.sh_mma_bf16
#define sh_mma_f16 SH_CALL.sh_mma_f16
